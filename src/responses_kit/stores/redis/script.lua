-- The server side of RedisStore; each call is atomic: EVALSHA <sha> 0 <command> <prefix> <ttl> <arguments>.
--
-- Text is percent-encoded, so it holds no colon and no space. A name is `owner:id`; ids, items and keys of an owner are
-- passed and stored with a leading colon. All keys expire `ttl` milliseconds after their last use:
--
--   <prefix>record:<owner>:<id>  hash: a record
--     head                       "<key> <fingerprint> <previous id> <items> ..."; the rest is opaque
--     state                      "<final> <cancelled> <lease>"
--     body                       opaque
--     next                       sequence number of the next event
--     stamp                      id of the latest write: a repeated write is not applied again
--   <prefix>log:<owner>:<id>     stream: one entry per piece; id: number after its last event, field: of its first
--   <prefix>item:<owner>:<item>  sorted set: the records that hold an item, oldest first
--   <prefix>key:<owner>:<key>    string: the record with an idempotency key
--   <prefix>leases               sorted set: the names of records in progress, by expiry of their leases

local command, prefix, ttl = ARGV[1], ARGV[2], tonumber(ARGV[3])

local MAX_BYTES = 256 * 1024   -- of a reply: reading in a script costs ten times as much as without
local MAX_STEPS = 1000         -- records of a chain, or stale leases, per call
local FRESH = ttl * 15 / 16    -- records with this much time left need no renewal yet
local EACH = ':[^:]*'

local LEASES = prefix .. 'leases'
local function record_key(name) return prefix .. 'record:' .. name end
local function log_key(name) return prefix .. 'log:' .. name end
local function item_key(owner, item) return prefix .. 'item:' .. owner .. item end
local function key_key(owner, key) return prefix .. 'key:' .. owner .. key end

local function split_name(name)
  return string.match(name, '^([^:]*)(:.*)$')
end

local function head_of(head)
  return string.match(head, '^(%S*) %S* (%S*) (%S*)')  -- key, previous, items
end

local function state_of(state)
  if state then
    return string.sub(state, 1, 1) == '1', string.sub(state, 3, 3) == '1', string.sub(state, 5)
  end
end

local function exists(name)
  return redis.call('EXISTS', record_key(name)) == 1
end

local function set_lease(name, till)
  redis.call('ZADD', LEASES, till, name)
  redis.call('PEXPIRE', LEASES, ttl)
end

-- Using a record renews it and its chain.

local function renew_keys(name, head, final)
  local owner = split_name(name)
  local key, _, items = head_of(head)
  redis.call('PEXPIRE', record_key(name), ttl)
  for item in string.gmatch(items, EACH) do
    redis.call('PEXPIRE', item_key(owner, item), ttl)
  end
  if key ~= '' then
    redis.call('PEXPIRE', key_key(owner, key), ttl)
  end
  if not final then
    redis.call('PEXPIRE', log_key(name), ttl)
    redis.call('PEXPIRE', LEASES, ttl)
  end
end

local function renew_chain(name)
  local owner = split_name(name)
  local names, seen = {}, {}
  while not seen[name] and #names < MAX_STEPS do
    local record = redis.call('HMGET', record_key(name), 'head', 'state')
    if not record[1] then
      break
    end
    if redis.call('PTTL', record_key(name)) < FRESH then
      renew_keys(name, record[1], state_of(record[2]))
    end
    names[#names + 1], seen[name] = name, true
    local _, previous = head_of(record[1])
    if previous == '' then
      break
    end
    name = owner .. previous
  end
  return names
end

local function use(name)
  if redis.call('PTTL', record_key(name)) < FRESH then
    renew_chain(name)
  end
end

-- Return all names, and head, state and body of the first ones that fit into a reply.
local function read(names)
  local reply, size = { table.concat(names, ' ') }, 0
  for _, name in ipairs(names) do
    size = size + redis.call('HSTRLEN', record_key(name), 'body')
    if size > MAX_BYTES then
      break
    end
    for _, field in ipairs(redis.call('HMGET', record_key(name), 'head', 'state', 'body')) do
      reply[#reply + 1] = field
    end
  end
  return reply
end

local function index(name, before, now)
  local owner, id = split_name(name)
  local seconds, left = redis.call('TIME')[1], {}
  for item in string.gmatch(before, EACH) do
    left[item] = true
  end
  for item in string.gmatch(now, EACH) do
    local key = item_key(owner, item)
    left[item] = nil
    if redis.call('ZADD', key, 'NX', seconds, id) == 1 and redis.call('ZCARD', key) > 8 then
      -- The set of a repeatedly sent item never expires, so expired records must be removed from it.
      for _, other in ipairs(redis.call('ZRANDMEMBER', key, 2)) do
        if not exists(owner .. other) then
          redis.call('ZREM', key, other)
        end
      end
    end
  end
  for item in pairs(left) do
    redis.call('ZREM', item_key(owner, item), id)
  end
end

local function append(name, start, stop, data)
  redis.call('XADD', log_key(name), stop .. '-0', start, data)
  redis.call('PEXPIRE', log_key(name), ttl)
end

local commands = {}

function commands.create(name, stamp, head, state, body)
  local owner, id = split_name(name)
  local key, _, items = head_of(head)
  if key ~= '' then
    local other = redis.call('GET', key_key(owner, key))
    if other and other ~= id and exists(owner .. other) then
      use(owner .. other)
      return read({ owner .. other })
    end
  end
  local known = redis.call('HGET', record_key(name), 'stamp')
  if known then
    return known == stamp and 1 or 0
  end
  redis.call('HSET', record_key(name), 'stamp', stamp, 'next', '0', 'head', head, 'state', state, 'body', body)
  redis.call('UNLINK', log_key(name))
  if key ~= '' then
    redis.call('SET', key_key(owner, key), id)
  end
  index(name, '', items)
  local final, _, till = state_of(state)
  if not final then
    set_lease(name, till)
  end
  renew_keys(name, head, final)
  return 1
end

function commands.update(name, stamp, head, state, body, log_ttl, start, stop, data)
  local old = redis.call('HMGET', record_key(name), 'stamp', 'next', 'state', 'head')
  if old[1] == stamp then
    return 1
  end
  local ended, cancelled = state_of(old[3])
  if ended ~= false or start and start ~= old[2] then
    return 0
  end
  head = string.match(old[4], '^%S* %S* ') .. string.match(head, '^%S* %S* (.*)$')
  if cancelled then
    state = string.sub(state, 1, 2) .. '1' .. string.sub(state, 4)
  end
  redis.call('HSET', record_key(name), 'stamp', stamp, 'next', stop or old[2], 'head', head, 'state', state, 'body',
    body)
  if start then
    append(name, start, stop, data)
  end
  local _, _, before = head_of(old[4])
  local _, _, now = head_of(head)
  index(name, before, now)
  local final, _, till = state_of(state)
  if final then
    redis.call('ZREM', LEASES, name)
    redis.call('PEXPIRE', log_key(name), log_ttl)
  else
    set_lease(name, till)
  end
  renew_keys(name, head, final)
  return 1
end

function commands.append(places, data)
  local at, answers = 1, {}
  for name, stamp, start, stop, size in string.gmatch(places, '(%S+) (%S+) (%S+) (%S+) (%S+)\n') do
    local old = redis.call('HMGET', record_key(name), 'stamp', 'next', 'state')
    local past = at + tonumber(size)
    local done = old[1] == stamp
    if not done and state_of(old[3]) == false and old[2] == start then
      redis.call('HSET', record_key(name), 'stamp', stamp, 'next', stop)
      append(name, start, stop, string.sub(data, at, past - 1))
      done = true
    end
    at = past
    answers[#answers + 1] = done and '1' or '0'
  end
  return table.concat(answers)
end

function commands.get(name)
  use(name)
  return read({ name })
end

function commands.find(owner, key)
  local id = redis.call('GET', key_key(owner, key))
  if not id or not exists(owner .. id) then
    return false
  end
  use(owner .. id)
  return read({ owner .. id })
end

function commands.chain(name)
  return read(renew_chain(name))
end

function commands.items(owner, items)
  local holders, names, seen = {}, {}, {}
  for item in string.gmatch(items, EACH) do
    local key, id = item_key(owner, item), nil
    repeat
      id = redis.call('ZRANGE', key, 0, 0)[1]
      local gone = id and not exists(owner .. id)
      if gone then
        redis.call('ZREM', key, id)
      end
    until not gone
    local name = id and owner .. id or ''
    if id and not seen[name] then
      use(name)
      names[#names + 1], seen[name] = name, true
    end
    holders[#holders + 1] = name
  end
  local reply = read(names)
  table.insert(reply, 1, table.concat(holders, ' '))
  return reply
end

function commands.events(name, from)
  local stop = redis.call('HGET', record_key(name), 'next')
  if not stop or stop ~= '0' and redis.call('EXISTS', log_key(name)) == 0 then
    return false
  end
  local places, reply, size = { stop }, { '' }, 0
  repeat
    local pieces = redis.call('XRANGE', log_key(name), from, '+', 'COUNT', 32)
    for _, piece in ipairs(pieces) do
      local past, start, data = string.match(piece[1], '^%d+'), piece[2][1], piece[2][2]
      places[#places + 1] = start .. ' ' .. past
      reply[#reply + 1] = data
      size = size + #data
      from = past .. '-1'
    end
  until #pieces < 32 or size > MAX_BYTES
  reply[1] = table.concat(places, '\n')
  return reply
end

function commands.delete(name)
  local owner, id = split_name(name)
  local head = redis.call('HGET', record_key(name), 'head')
  if not head then
    return 0
  end
  local key, _, items = head_of(head)
  index(name, items, '')
  if redis.call('GET', key_key(owner, key)) == id then
    redis.call('DEL', key_key(owner, key))
  end
  redis.call('ZREM', LEASES, name)
  redis.call('UNLINK', record_key(name), log_key(name))
  return 1
end

function commands.cancel(name, till)
  local final, _, until_now = state_of(redis.call('HGET', record_key(name), 'state'))
  if final ~= false then
    return 0
  end
  if tonumber(till) < tonumber(until_now) then
    set_lease(name, till)
  else
    till = until_now
  end
  redis.call('HSET', record_key(name), 'state', '0 1 ' .. till)
  return 1
end

function commands.renew(names, till)
  local answers = {}
  for name in string.gmatch(names, '%S+') do
    local final, cancelled = state_of(redis.call('HGET', record_key(name), 'state'))
    local live = final == false and not cancelled
    if live and till then
      redis.call('HSET', record_key(name), 'state', '0 0 ' .. till)
      set_lease(name, till)
      use(name)
    end
    answers[#answers + 1] = live and '1' or '0'
  end
  return table.concat(answers)
end

-- Return nothing if it must be called again, because it removed MAX_STEPS stale leases.
function commands.expired(now, limit)
  local names, gone = {}, 0
  repeat
    local found = redis.call('ZRANGEBYSCORE', LEASES, '-inf', '(' .. now, 'LIMIT', #names, limit - #names)
    for _, name in ipairs(found) do
      if state_of(redis.call('HGET', record_key(name), 'state')) == false then
        names[#names + 1] = name
      else
        redis.call('ZREM', LEASES, name)
        gone = gone + 1
      end
    end
    if gone >= MAX_STEPS then
      return false
    end
  until #found == 0
  return read(names)
end

function commands.prune(rank)
  local names, gone = redis.call('ZRANGE', LEASES, rank, rank + MAX_STEPS - 1), 0
  for _, name in ipairs(names) do
    if not exists(name) then
      redis.call('ZREM', LEASES, name)
      gone = gone + 1
    end
  end
  return { #names, gone }
end

return commands[command](unpack(ARGV, 4))
