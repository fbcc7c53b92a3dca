"use strict";

const form = document.getElementById("ask");
const talk = document.getElementById("talk");
const question = document.getElementById("question");
const send = document.getElementById("send");
const stop = document.getElementById("stop");

let previous = null; // id of the response that the next question follows
let running = null; // the AbortController of the answer that comes in

class Trouble extends Error {} // its message is a sentence for people

function grow(parent, child) {
  const low = form.getBoundingClientRect().top < innerHeight;
  parent.append(child);
  if (low) form.scrollIntoView({ block: "nearest" }); // unless the reader has scrolled up
}

function add(tag, className, text) {
  const element = document.createElement(tag);
  element.className = className;
  element.textContent = text; // never as HTML
  grow(talk, element);
  return element;
}

async function post(body, signal) {
  const headers = { "Content-Type": "application/json" };
  const reply = await fetch(form.action, { method: "POST", headers, body: JSON.stringify(body), signal }).catch((error) => {
    throw error.name === "AbortError" ? error : new Trouble("The server cannot be reached. Are you online?");
  });
  if (reply.ok) return reply;
  const { code, message } = (await reply.json().catch(() => ({}))).error ?? {};
  if (reply.status === 401) throw Object.assign(new Trouble("You are not logged in any more."), { login: true });
  if (code === "previous_response_not_found") {
    previous = null;
    throw new Trouble("This conversation is not kept any more. Ask again to begin a new one.");
  }
  throw new Trouble(message ?? `That did not work (status ${reply.status}). Try again later.`);
}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop(); // the beginning of an event whose end is still to come
    for (const block of blocks) {
      const data = block.split("\n").find((line) => line.startsWith("data: "))?.slice(6);
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

async function answer(input, signal, piece) {
  const reply = await post({ input, previous_response_id: previous, stream: true }, signal);
  for await (const event of events(reply.body)) {
    if (event.type === "response.output_text.delta") piece(event.delta);
    if (event.type === "response.failed") throw new Trouble(event.response.error.message);
    if (event.type === "response.completed" || event.type === "response.incomplete") return event.response.id;
  }
  throw new TypeError("the stream has no end");
}

async function ask(text) {
  add("h2", "asked", text);
  const answered = add("p", "answered", "");
  running = new AbortController();
  send.hidden = true;
  stop.hidden = false;
  talk.setAttribute("aria-busy", "true"); // so that it is read aloud once, when it is whole
  try {
    previous = await answer(text, running.signal, (piece) => grow(answered, piece));
  } catch (error) {
    if (error.name === "AbortError") {
      add("p", "faint", "Stopped."); // the server sees that nobody listens, and stops as well
    } else {
      const said = add("p", "trouble", error instanceof Trouble ? error.message : "The connection was lost. Ask again.");
      said.setAttribute("role", "alert");
      if (error.login) said.append(" ", Object.assign(document.createElement("a"), { href: form.dataset.login, textContent: "Log in" }));
    }
    if (answered.textContent === "") answered.remove();
  }
  running = null;
  send.hidden = false;
  stop.hidden = true;
  talk.setAttribute("aria-busy", "false");
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
