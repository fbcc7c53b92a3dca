"use strict";

// A chat over POST /v1/responses, with fetch and server-sent events and without libraries.

const form = document.getElementById("ask");
const log = document.getElementById("log");
const welcome = document.getElementById("welcome");
const question = document.getElementById("question");
const send = document.getElementById("send");
const stop = document.getElementById("stop");

const api = form.dataset.api; // "/v1/"
const MAX_TURNS = 30; // shown after a reload

let running = null; // the AbortController of the current answer

class Failure extends Error {} // its message is shown to the user

// Only the last response's id is stored here. The server stores the conversation.

const STORAGE_KEY = `last-response-of-${form.dataset.user}`;
const loadLast = () => localStorage.getItem(STORAGE_KEY);
const saveLast = (id) => (id === null ? localStorage.removeItem(STORAGE_KEY) : localStorage.setItem(STORAGE_KEY, id));

// The page.

function show(kind, text) {
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
  const message = document.createElement("p");
  message.className = kind;
  message.textContent = text; // never as HTML
  welcome.hidden = true;
  log.append(message);
  if (isAtEnd) log.scrollTop = log.scrollHeight;
  return message;
}

function append(message, text) {
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
  message.append(text);
  if (isAtEnd) log.scrollTop = log.scrollHeight; // unless the user has scrolled up
}

function showError(error) {
  const note = show("note", error.message);
  note.setAttribute("role", "alert");
  if (error.link) note.append(" ", error.link);
}

function setRunning(controller) {
  running = controller;
  send.hidden = controller !== null;
  stop.hidden = controller === null;
  log.setAttribute("aria-busy", String(controller !== null)); // screen readers read it when it is complete
}

// The API.

async function call(path, options = {}) {
  let reply;
  try {
    reply = await fetch(api + path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("The shop cannot be reached. Check your connection and try again.");
  }
  if (reply.ok) return reply;
  const { code, message } = (await reply.json().catch(() => ({}))).error ?? {};
  if (reply.status === 401) {
    const failure = new Failure("You are not logged in any more.");
    failure.link = Object.assign(document.createElement("a"), { href: form.dataset.login, textContent: "Log in" });
    throw failure;
  }
  if (code === "csrf_failed") throw new Failure("This page is out of date. Reload it and try again.");
  if (code === "previous_response_not_found" || code === "response_not_found") {
    saveLast(null);
    throw new Failure("The previous conversation has expired. Ask again to start a new one.");
  }
  if (reply.status === 429) throw new Failure("There are too many requests. Try again in a minute.");
  throw new Failure(message ?? `The request failed (status ${reply.status}). Try again later.`);
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const received = (rest + value).split("\n\n"); // the last one may be incomplete
      rest = received.pop();
      for (const event of received) {
        const data = event.split("\n").find((line) => line.startsWith("data: ")); // comments have no data
        if (data !== undefined && data !== "data: [DONE]") yield JSON.parse(data.slice("data: ".length));
      }
    }
  } catch (error) {
    throw error.name === "AbortError" ? error : new Failure("The connection was lost. Try again.");
  }
}

async function ask(text) {
  const before = loadLast();
  show("user", text);
  const answer = show("assistant", "");
  setRunning(new AbortController());
  try {
    const reply = await call("responses", {
      method: "POST",
      headers: { "Content-Type": "application/json", "X-CSRFToken": form.elements.csrfmiddlewaretoken.value },
      body: JSON.stringify({ input: text, previous_response_id: before, stream: true }),
      signal: running.signal,
    });
    let ended = false;
    for await (const event of events(reply.body)) {
      if (event.type === "response.created") saveLast(event.response.id);
      if (event.type === "response.output_text.delta") append(answer, event.delta);
      if (event.type === "response.failed") throw new Failure(event.response.error.message);
      ended ||= event.type === "response.completed" || event.type === "response.incomplete";
    }
    if (!ended) throw new Failure("The connection was lost. Try again.");
  } catch (error) {
    if (error.name === "AbortError") {
      show("note", "Stopped."); // the server stops, too, when the connection closes
    } else {
      if (loadLast() !== null) saveLast(before);
      showError(error);
    }
  } finally {
    if (answer.textContent === "") answer.remove();
    setRunning(null);
    question.focus();
  }
}

// Restores the last conversation, from its end to its beginning.

async function loadTurn(id) {
  const [response, input] = await Promise.all([
    call(`responses/${id}`).then((reply) => reply.json()),
    call(`responses/${id}/input_items?order=asc`).then((reply) => reply.json()),
  ]);
  const text = (items) => items.flatMap((item) => item.content ?? []).map((part) => part.text ?? "").join("");
  return { question: text(input.data), answer: text(response.output), before: response.previous_response_id };
}

async function restore() {
  const turns = [];
  try {
    for (let id = loadLast(); id !== null && turns.length < MAX_TURNS; id = turns[0].before) turns.unshift(await loadTurn(id));
  } catch (error) {
    showError(error);
  }
  for (const { question, answer } of turns) {
    show("user", question);
    if (answer) show("assistant", answer);
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
  saveLast(null);
  location.reload();
});

send.disabled = true;
restore();
