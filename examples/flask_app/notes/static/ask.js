"use strict";

const form = document.getElementById("ask");
const conversation = document.getElementById("conversation");
const question = document.getElementById("question");
const send = document.getElementById("send");
const stop = document.getElementById("stop");

let previous = null; // id of the last response
let running = null; // AbortController of the current answer

class UserError extends Error {} // its message is shown to the user

function append(parent, child) {
  const isVisible = form.getBoundingClientRect().top < innerHeight;
  parent.append(child);
  if (isVisible) form.scrollIntoView({ block: "nearest" }); // unless the user has scrolled up
}

function add(tag, className, text) {
  const element = document.createElement(tag);
  element.className = className;
  element.textContent = text; // never as HTML
  append(conversation, element);
  return element;
}

async function post(body, signal) {
  const headers = { "Content-Type": "application/json" };
  const reply = await fetch(form.action, { method: "POST", headers, body: JSON.stringify(body), signal }).catch((error) => {
    throw error.name === "AbortError" ? error : new UserError("The server cannot be reached. Are you online?");
  });
  if (reply.ok) return reply;
  const { code, message } = (await reply.json().catch(() => ({}))).error ?? {};
  if (reply.status === 401) throw Object.assign(new UserError("You are not logged in any more."), { login: true });
  if (code === "previous_response_not_found") {
    previous = null;
    throw new UserError("This conversation has expired. Ask again to start a new one.");
  }
  throw new UserError(message ?? `The request failed (status ${reply.status}). Try again later.`);
}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop(); // an incomplete event
    for (const block of blocks) {
      const data = block.split("\n").find((line) => line.startsWith("data: "))?.slice(6);
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

async function answer(input, signal, onDelta) {
  const reply = await post({ input, previous_response_id: previous, stream: true }, signal);
  for await (const event of events(reply.body)) {
    if (event.type === "response.output_text.delta") onDelta(event.delta);
    if (event.type === "response.failed") throw new UserError(event.response.error.message);
    if (event.type === "response.completed" || event.type === "response.incomplete") return event.response.id;
  }
  throw new TypeError("the stream ended early");
}

async function ask(text) {
  add("h2", "question", text);
  const answerText = add("p", "answer", "");
  running = new AbortController();
  send.hidden = true;
  stop.hidden = false;
  conversation.setAttribute("aria-busy", "true"); // screen readers wait for the whole answer
  try {
    previous = await answer(text, running.signal, (delta) => append(answerText, delta));
  } catch (error) {
    if (error.name === "AbortError") {
      add("p", "faint", "Stopped."); // the server detects the disconnect and stops generating
    } else {
      const element = add("p", "error", error instanceof UserError ? error.message : "The connection was lost. Ask again.");
      element.setAttribute("role", "alert");
      if (error.login) element.append(" ", Object.assign(document.createElement("a"), { href: form.dataset.login, textContent: "Log in" }));
    }
    if (answerText.textContent === "") answerText.remove();
  }
  running = null;
  send.hidden = false;
  stop.hidden = true;
  conversation.setAttribute("aria-busy", "false");
  question.focus();
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  const text = question.value.trim();
  if (text === "" || running) return;
  question.value = "";
  ask(text);
});

stop.addEventListener("click", () => running?.abort());
