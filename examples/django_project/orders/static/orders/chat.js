"use strict";

// A conversation with POST /v1/responses. There is no library: fetch, and a stream of server-sent events.

const form = document.getElementById("ask");
const log = document.getElementById("log");
const welcome = document.getElementById("welcome");
const question = document.getElementById("question");
const send = document.getElementById("send");
const stop = document.getElementById("stop");

const api = form.dataset.api; // "/v1/"
const MOST_TURNS = 30; // that are shown after a reload

let running = null; // what aborts the answer that comes in

class Failure extends Error {} // its message is for people

// The last response's id is all that has to be kept: the server has the conversation before it.

const PLACE = `last-response-of-${form.dataset.user}`;
const last = () => localStorage.getItem(PLACE);
const remember = (id) => (id === null ? localStorage.removeItem(PLACE) : localStorage.setItem(PLACE, id));

// What is shown.

function show(kind, text) {
  const low = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
  const said = document.createElement("p");
  said.className = kind;
  said.textContent = text; // never as HTML
  welcome.hidden = true;
  log.append(said);
  if (low) log.scrollTop = log.scrollHeight;
  return said;
}

function grow(said, text) {
  const low = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
  said.append(text);
  if (low) log.scrollTop = log.scrollHeight; // unless its reader has scrolled up
}

function explain(error) {
  const note = show("note", error.message);
  note.setAttribute("role", "alert");
  if (error.link) note.append(" ", error.link);
}

function busy(controller) {
  running = controller;
  send.hidden = controller !== null;
  stop.hidden = controller === null;
  log.setAttribute("aria-busy", String(controller !== null)); // read aloud when it is whole
}

// The API.

async function call(path, options = {}) {
  let reply;
  try {
    reply = await fetch(api + path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("The shop cannot be reached. Are you online? Then ask again.");
  }
  if (reply.ok) return reply;
  const { code, message } = (await reply.json().catch(() => ({}))).error ?? {};
  if (reply.status === 401) {
    const failure = new Failure("You are not logged in any more.");
    failure.link = Object.assign(document.createElement("a"), { href: form.dataset.login, textContent: "Log in" });
    throw failure;
  }
  if (code === "csrf_failed") throw new Failure("This page is too old. Load it again, and ask again.");
  if (code === "previous_response_not_found" || code === "response_not_found") {
    remember(null);
    throw new Failure("What we talked about is not kept any more. Ask again, and we begin anew.");
  }
  if (reply.status === 429) throw new Failure("Too many people are asking. Try again in a minute.");
  throw new Failure(message ?? `That did not work (status ${reply.status}). Try again later.`);
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const whole = (rest + value).split("\n\n"); // an event may come in pieces
      rest = whole.pop();
      for (const lines of whole) {
        const data = lines.split("\n").find((line) => line.startsWith("data: ")); // which comments have not
        if (data !== undefined && data !== "data: [DONE]") yield JSON.parse(data.slice("data: ".length));
      }
    }
  } catch (error) {
    throw error.name === "AbortError" ? error : new Failure("The connection was lost. Ask again.");
  }
}

async function ask(text) {
  const before = last();
  show("user", text);
  const answer = show("assistant", "");
  busy(new AbortController());
  try {
    const reply = await call("responses", {
      method: "POST",
      headers: { "Content-Type": "application/json", "X-CSRFToken": form.elements.csrfmiddlewaretoken.value },
      body: JSON.stringify({ input: text, previous_response_id: before, stream: true }),
      signal: running.signal,
    });
    let ended = false;
    for await (const event of events(reply.body)) {
      if (event.type === "response.created") remember(event.response.id);
      if (event.type === "response.output_text.delta") grow(answer, event.delta);
      if (event.type === "response.failed") throw new Failure(event.response.error.message);
      ended ||= event.type === "response.completed" || event.type === "response.incomplete";
    }
    if (!ended) throw new Failure("The connection was lost. Ask again.");
  } catch (error) {
    if (error.name === "AbortError") {
      show("note", "Stopped."); // the server has seen that nobody listens, and has stopped as well
    } else {
      if (last() !== null) remember(before);
      explain(error);
    }
  } finally {
    if (answer.textContent === "") answer.remove();
    busy(null);
    question.focus();
  }
}

// The last conversation, from its end to its beginning.

async function turn(id) {
  const [response, asked] = await Promise.all([
    call(`responses/${id}`).then((reply) => reply.json()),
    call(`responses/${id}/input_items?order=asc`).then((reply) => reply.json()),
  ]);
  const text = (items) => items.flatMap((item) => item.content ?? []).map((part) => part.text ?? "").join("");
  return { asked: text(asked.data), said: text(response.output), before: response.previous_response_id };
}

async function restore() {
  const turns = [];
  try {
    for (let id = last(); id !== null && turns.length < MOST_TURNS; id = turns[0].before) turns.unshift(await turn(id));
  } catch (error) {
    explain(error);
  }
  for (const { asked, said } of turns) {
    show("user", asked);
    if (said) show("assistant", said);
  }
  welcome.hidden = log.childElementCount > 1;
  log.scrollTop = log.scrollHeight;
  send.disabled = false;
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  const text = question.value.trim();
  if (text === "" || running !== null || send.disabled) return;
  question.value = "";
  ask(text);
});

question.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    form.requestSubmit();
  }
});

stop.addEventListener("click", () => running?.abort());

welcome.addEventListener("click", (event) => {
  if (event.target instanceof HTMLButtonElement && !send.disabled) ask(event.target.textContent);
});

document.getElementById("new").addEventListener("click", () => {
  running?.abort();
  remember(null);
  location.reload();
});

send.disabled = true;
restore();
