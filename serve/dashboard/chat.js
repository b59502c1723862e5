// A chat with the models of this server, by the API that other clients use (`POST /v1/chat/completions`). Output of models and
// servers reaches the page as text in elements that `markdown.js` names. The API key is kept in memory, conversations in the
// browser's storage.

import { html } from "../dashboard/charts.js";
import { Chats } from "./chats.js";
import { MarkdownView, copy } from "./markdown.js";
import { Timeline } from "./timeline.js";

const THEME = "apt-jax-theme"; // shared with the dashboard
const RETRY_MS = 1500;
const $ = (id) => document.getElementById(id);

let apiKey = null;
const chats = new Chats();
let chat = chats.begin(); // this conversation
let answering = null; // the AbortController of the answer that is being written
let usable = false; // the chosen model has a chat template

// --- the server ----------------------------------------------------------------------------------------------------------------

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// Calls the server; asks the user for a key until the server accepts one.
async function call(path, body, signal) {
  for (;;) {
    const headers = body === undefined ? {} : { "content-type": "application/json" };
    if (apiKey) headers.authorization = `Bearer ${apiKey}`;
    const sent = body === undefined ? {} : { method: "POST", body: JSON.stringify(body) };
    const response = await fetch(path, { headers, cache: "no-store", signal, ...sent });
    if (response.ok) return response;
    if (response.status === 401) {
      await askForKey();
      continue;
    }
    throw new Refused(response.status, await messageOf(response));
  }
}

async function messageOf(response) {
  try { return (await response.json()).error.message; } catch { return `the server answered with status ${response.status}`; }
}

let asking = null;

function askForKey() {
  asking ??= new Promise((resolve) => {
    $("key-note").textContent = apiKey ? "That key is not accepted. Try another key." : "It is kept only in this page, until you leave the page.";
    apiKey = null;
    $("key").showModal();
    $("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      apiKey = $("key-input").value.trim();
      $("key-input").value = "";
      $("key").close();
      asking = null;
      resolve();
    }, { once: true });
  });
  return asking;
}

// The values of server-sent events, until `[DONE]`.
async function* eventsOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) throw new Error("the server ended the answer early");
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = part.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart()).join("\n");
        if (data === "[DONE]") return;
        if (data) yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// --- models --------------------------------------------------------------------------------------------------------------------

async function listModels() {
  for (;;) {
    try {
      const models = (await (await call("v1/models")).json()).data;
      $("model").replaceChildren(...models.map(({ id }) => new Option(id, id)));
      $("model").disabled = false;
      await chooseModel();
      return;
    } catch (error) {
      show("connecting", error.status === 503 ? sentence(error.message) : "The server does not answer. Trying again.");
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }
}

// Has the server render one message, to recognise a model that cannot chat before the first question.
async function chooseModel() {
  const model = $("model").value;
  document.title = `${model} · apt-jax chat`;
  usable = true;
  show("ready", "");
  try {
    await call("tokenize", { model, messages: [{ role: "user", content: "Hi" }] });
  } catch (error) {
    if (model !== $("model").value) return;
    if (error.status !== 400 || !/chat template|tokenizer/.test(error.message)) return;
    usable = false;
    show("no-template", `${model} cannot chat: it has no chat template. Serve a model that has one (apt-jax serve smollm2-135m), or give it one (--chat-template FILE).`);
  }
}

const sentence = (text) => `${text.charAt(0).toUpperCase()}${text.slice(1)}.`;

function show(state, text) {
  document.body.dataset.state = state;
  $("banner").hidden = !text;
  $("banner").textContent = text;
  $("send").disabled = !usable || answering !== null;
}

// --- questions and answers -----------------------------------------------------------------------------------------------------

const numberOf = (id) => ($(id).value === "" ? undefined : Number($(id).value));

// The request for an answer to these turns.
function bodyOf(turns) {
  const system = $("system").value.trim();
  const messages = turns.map(({ role, content }) => ({ role, content }));
  return {
    model: $("model").value,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    temperature: numberOf("temperature"),
    top_p: numberOf("top-p"),
    max_completion_tokens: numberOf("max-tokens"),
    slo: { ttft_ms: numberOf("ttft"), tbt_ms: numberOf("tbt"), e2e_ms: numberOf("e2e") },
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    aptjax_timings: true,
  };
}

// The node of a turn: the speaker, the reasoning if there is any, the text, and buttons.
class TurnView {
  constructor(turn, at) {
    this.node = html("article", `turn ${turn.role}`);
    this.node.dataset.at = at;
    this.text = html("div", "text");
    this.actions = html("div", "actions");
    this.reasoning = null;
    this.node.append(html("div", "who", turn.role === "user" ? "You" : turn.model ?? "Assistant"), this.text, this.actions);
    this.markdown = turn.role === "user" ? null : new MarkdownView(this.text);
    this.show(turn);
    this.action("Copy", (button) => copy(turn.content, button));
    if (turn.role === "user") this.action("Edit", () => edit(this, turn, at));
    else this.action("Regenerate", () => { if (!answering) answer(at); });
  }

  action(label, act) {
    const button = html("button", "", label);
    button.type = "button";
    button.addEventListener("click", () => act(button));
    this.actions.append(button);
  }

  show(turn) {
    if (turn.reasoning) this.think(turn);
    if (this.markdown) this.markdown.set(turn.content);
    else this.text.textContent = turn.content;
  }

  think(turn) {
    if (!this.reasoning) {
      this.reasoning = html("details", "reasoning");
      this.thoughts = document.createTextNode("");
      const box = html("div", "thoughts");
      box.append(this.thoughts);
      this.reasoning.append(html("summary"), box);
      this.text.before(this.reasoning);
    }
    this.thoughts.appendData(turn.reasoning.slice(this.thoughts.length));
    this.reasoning.querySelector("summary").textContent = turn.content || this.node.getAttribute("aria-busy") !== "true" ? "Reasoning" : "Reasoning …";
  }
}

function addTurn(turn, at) {
  const view = new TurnView(turn, at);
  $("log").append(view.node);
  return view;
}

// Replaces a question by a field; the edited question and its answer replace all later turns.
function edit(view, turn, at) {
  if (answering) return;
  const form = html("form", "edit"), area = html("textarea"), send = html("button", "", "Send"), cancel = html("button", "", "Cancel");
  area.value = turn.content;
  area.rows = Math.min(12, turn.content.split("\n").length + 1);
  area.setAttribute("aria-label", "Question");
  cancel.type = "button";
  form.append(area, send, cancel);
  const close = () => { form.replaceWith(view.text, view.actions); };
  cancel.addEventListener("click", close);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const question = area.value.trim();
    if (question && !$("send").disabled) ask(question, at);
  });
  view.actions.remove();
  view.text.replaceWith(form);
  area.focus();
}

// Keeps the end visible, unless the reader has scrolled up.
function following(change) {
  const log = $("log"), atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  change();
  if (atEnd) log.scrollTop = log.scrollHeight;
}

// Shows the turns of this conversation before `end`.
function showTurns(end = chat.turns.length) {
  $("log").replaceChildren();
  chat.turns.slice(0, end).forEach(addTurn);
  if (!end) {
    $("log").append($("hello").content.cloneNode(true));
    for (const button of $("log").querySelectorAll(".examples button")) {
      button.addEventListener("click", () => {
        $("question").value = button.textContent;
        $("ask").requestSubmit();
      });
    }
  }
  $("log").scrollTop = $("log").scrollHeight;
}

// Removes turn `at` and all later turns from the page.
function cut(at) {
  for (const node of [...$("log").children]) if (!node.dataset.at || Number(node.dataset.at) >= at) node.remove();
}

// Asks a question that replaces turn `at` and all later turns.
function ask(question, at = chat.turns.length) {
  const asked = { role: "user", content: question };
  cut(at);
  addTurn(asked, at);
  return answer(at + 1, [...chat.turns.slice(0, at), asked]);
}

// Writes turn `at`, the answer to `turns`; it replaces the earlier turns from there on.
async function answer(at, turns = chat.turns.slice(0, at)) {
  const ours = chat; // another conversation may begin meanwhile
  const body = bodyOf(turns), controller = answering = new AbortController();
  const turn = { role: "assistant", content: "", model: body.model };
  cut(at);
  const view = addTurn(turn, at), timeline = new Timeline(body.slo);
  view.node.setAttribute("aria-busy", "true");
  view.actions.before(timeline.node);
  $("log").scrollTop = $("log").scrollHeight;
  $("stop").hidden = false;
  $("send").hidden = true;
  show("answering", "");
  let id = null, tokens = 0, problem = null;
  const frames = setInterval(() => following(() => {
    timeline.draw();
    view.show(turn);
  }), 100);
  try {
    const response = await call("v1/chat/completions", body, controller.signal);
    for await (const event of eventsOf(response.body)) {
      if (event.error) throw new Error(event.error.message);
      id = event.id;
      const now = event.usage?.completion_tokens ?? tokens, choice = event.choices[0];
      if (now > tokens) timeline.tokens(now - tokens);
      tokens = now;
      if (!choice) continue;
      turn.content += choice.delta.content ?? "";
      if (choice.delta.reasoning_content) turn.reasoning = (turn.reasoning ?? "") + choice.delta.reasoning_content;
      if (choice.finish_reason) timeline.finish(choice.finish_reason, choice.aptjax);
    }
  } catch (error) {
    problem = error;
  }
  clearInterval(frames);
  view.node.setAttribute("aria-busy", "false");
  view.show(turn);
  if (controller.signal.aborted) timeline.finish("stopped");
  else if (problem) {
    timeline.finish("failed");
    view.node.append(html("p", "problem", problem instanceof TypeError ? "The server does not answer." : problem.message));
  }
  if (answering === controller) {
    answering = null;
    $("stop").hidden = true;
    $("send").hidden = false;
    show(document.body.dataset.state === "answering" ? "ready" : document.body.dataset.state, "");
  }
  if (id === null && problem) { // no answer has begun: earlier turns stay, and the question can be asked again
    view.actions.remove();
    if (!tokens) timeline.node.remove();
    if (ours === chat && ours.turns.length >= turns.length) {
      showTurns();
      $("log").append(view.node);
      view.node.dataset.at = Infinity;
    } else if (ours === chat) {
      view.node.previousElementSibling?.classList.add("unanswered");
      if (!$("question").value) $("question").value = turns.at(-1).content;
    }
  } else {
    ours.turns = [...turns, turn];
    chats.keep(ours);
    listChats();
  }
  following(() => timeline.draw());
  if (id !== null) await explain(id, timeline);
}

// Shows the scheduler's decisions about the request, if the server keeps them.
async function explain(id, timeline) {
  try {
    const { events } = await (await call(`v1/requests/${encodeURIComponent(id)}/decisions`)).json();
    following(() => timeline.explain(events));
  } catch { /* the server keeps no decisions, or dropped those of this request */ }
}

// --- controls ------------------------------------------------------------------------------------------------------------------

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = $("question").value.trim();
  if (!question || $("send").disabled) return;
  if (!$("settings").checkValidity()) {
    openSettings(true);
    $("settings").reportValidity();
    return;
  }
  $("question").value = "";
  ask(question);
});
$("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("ask").requestSubmit();
});
$("stop").addEventListener("click", () => answering?.abort());
$("settings").addEventListener("submit", (event) => event.preventDefault());
$("model").addEventListener("change", chooseModel);
$("key").addEventListener("cancel", (event) => event.preventDefault()); // a key is required
$("reset").addEventListener("click", () => open(chats.begin()));

// --- conversations -------------------------------------------------------------------------------------------------------------

function open(next) {
  answering?.abort();
  chat = next;
  showTurns();
  listChats();
  $("question").focus();
}

function listChats() {
  $("chats").querySelector("ul").replaceChildren(...chats.all.map((one) => {
    const item = html("li"), title = html("button", "title", one.title), remove = html("button", "remove", "×");
    title.type = remove.type = "button";
    title.title = one.title;
    if (one.id === chat.id) title.setAttribute("aria-current", "true");
    remove.setAttribute("aria-label", `Delete ${one.title}`);
    title.addEventListener("click", () => {
      openChats(false);
      open(one);
    });
    remove.addEventListener("click", () => {
      chats.remove(one.id);
      if (one.id === chat.id) open(chats.begin());
      else listChats();
    });
    item.append(title, remove);
    return item;
  }));
  $("clear").disabled = !chats.all.length;
  $("history").textContent = chats.all.length ? `Chats (${chats.all.length})` : "Chats";
}

function openChats(isOpen) {
  $("chats").hidden = !isOpen;
  $("history").setAttribute("aria-expanded", String(isOpen));
}
$("history").addEventListener("click", () => openChats($("chats").hidden));
$("clear").addEventListener("click", () => {
  chats.clear();
  open(chats.begin());
  openChats(false);
});

function openSettings(isOpen) {
  $("settings").hidden = !isOpen;
  $("options").setAttribute("aria-expanded", String(isOpen));
}
$("options").addEventListener("click", () => openSettings($("settings").hidden));

function stored() {
  try { return localStorage.getItem(THEME); } catch { return null; } // storage may be forbidden
}

function showTheme(theme) {
  const root = document.documentElement;
  if (theme === "light" || theme === "dark") root.dataset.theme = theme;
  else delete root.dataset.theme;
  $("theme").textContent = `Theme: ${root.dataset.theme ?? "system"}`;
}
$("theme").addEventListener("click", () => {
  const order = [undefined, "light", "dark"];
  const next = order[(order.indexOf(document.documentElement.dataset.theme) + 1) % 3];
  try { next ? localStorage.setItem(THEME, next) : localStorage.removeItem(THEME); } catch { /* it lasts as long as the page */ }
  showTheme(next);
});

showTheme(stored());
showTurns();
listChats();
listModels();
