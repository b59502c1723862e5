// Markdown of a model, as nodes. The nodes are only text and the elements named here: HTML of the model is never parsed, it cannot
// add scripts, styles or attributes, and nothing is loaded. Images are shown as links; links lead only to http, https and mailto.
//
// A growing text is parsed again only from its last block, so that the work is linear: fences are parsed here, other blocks by
// marked, up to a size.

import { Marked } from "./marked.js";
import { html } from "../dashboard/charts.js";

const MOST_BLOCK = 16000; // characters of a block that is parsed; longer blocks stay text
const MOST_PARSED = 300000; // characters of a text that is parsed
const MOST_DEPTH = 16;
const SLOW_MS = 60; // after a block that took longer, no further block is parsed
const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`\n]*)$/;
const SAFE = /^(https?:|mailto:)/i;
const marked = new Marked({ gfm: true });
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', "#39": "'", apos: "'", nbsp: "\u00a0" };

const decoded = (text) => text.replace(/&(amp|lt|gt|quot|#39|apos|nbsp);/g, (_, name) => ENTITIES[name]);

function element(name, children, attributes = {}) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function link(href, children) {
  let url = null;
  try { url = new URL(href); } catch { /* not a valid URL */ }
  if (!url || !SAFE.test(url.protocol)) return element("span", children);
  return element("a", children, { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow" });
}

function inline(tokens, depth) {
  if (depth > MOST_DEPTH) throw new RangeError("too deep");
  return tokens.flatMap((token) => {
    const inner = () => (token.tokens ? inline(token.tokens, depth + 1) : [decoded(token.text)]);
    switch (token.type) {
      case "strong": return element("strong", inner());
      case "em": return element("em", inner());
      case "del": return element("del", inner());
      case "br": return element("br", []);
      case "codespan": return element("code", [token.text]);
      case "link": return link(token.href, inner());
      case "image": return link(token.href, [decoded(token.text || token.href)]);
      case "html": return token.raw; // as it was written
      case "text": case "escape": return inner();
      default: return token.raw;
    }
  });
}

function blocks(tokens, depth = 0) {
  if (depth > MOST_DEPTH) throw new RangeError("too deep");
  return tokens.flatMap((token) => {
    switch (token.type) {
      case "space": case "def": return [];
      case "heading": return element(`h${Math.min(6, token.depth + 2)}`, inline(token.tokens, depth + 1));
      case "paragraph": return element("p", inline(token.tokens, depth + 1));
      case "text": return token.tokens ? inline(token.tokens, depth + 1) : [decoded(token.text)];
      case "hr": return element("hr", []);
      case "blockquote": return element("blockquote", blocks(token.tokens, depth + 1));
      case "code": { const view = new CodeView(token.lang ?? ""); view.set(token.text); return view.node; }
      case "list": {
        const items = token.items.map((item) => {
          const box = item.task ? [element("input", [], { type: "checkbox", disabled: "", ...(item.checked ? { checked: "" } : {}) }), " "] : [];
          return element("li", [...box, ...blocks(item.tokens.filter(({ type }) => type !== "checkbox"), depth + 1)]);
        });
        return element(token.ordered ? "ol" : "ul", items, token.ordered && token.start > 1 ? { start: token.start } : {});
      }
      case "table": {
        const row = (cells, name) => element("tr", cells.map((cell) => element(name, inline(cell.tokens, depth + 1), cell.align ? { class: cell.align } : {})));
        const table = element("table", [element("thead", [row(token.header, "th")]), element("tbody", token.rows.map((cells) => row(cells, "td")))]);
        return element("div", [table], { class: "wide", tabindex: "0" });
      }
      default: return element("p", [token.raw]);
    }
  });
}

// Code with its language and a button that copies it. `set` gets longer and longer texts.
class CodeView {
  constructor(language) {
    this.text = document.createTextNode("");
    const button = html("button", "copy", "Copy"), head = html("div", "code-head");
    button.type = "button";
    head.append(html("span", "", language.trim().slice(0, 40)), button);
    const pre = element("pre", [element("code", [this.text])], { tabindex: "0" });
    this.node = element("div", [head, pre], { class: "code" });
    button.addEventListener("click", () => copy(this.text.data, button));
  }

  set(text) {
    if (text.length >= this.text.length) this.text.appendData(text.slice(this.text.length));
    else this.text.data = text;
  }
}

class PlainView {
  constructor() {
    this.text = document.createTextNode("");
    this.node = element("div", [this.text], { class: "plain" });
  }

  set(text) { this.text.appendData(text.slice(this.text.length)); }
}

class BlockView {
  constructor() {
    this.node = html("div", "block");
    this.plain = null;
  }

  set(text, budget) {
    if (this.plain || budget.isSpent || text.length > MOST_BLOCK) return this.show(text);
    const begun = performance.now();
    try {
      this.node.replaceChildren(...blocks(marked.lexer(text)));
    } catch { // nested too deep for marked or for the page
      this.show(text);
    }
    budget.isSpent = performance.now() - begun > SLOW_MS;
  }

  show(text) {
    if (!this.plain) {
      this.plain = new PlainView();
      this.node.replaceChildren(this.plain.node);
    }
    this.plain.set(text);
  }
}

// A text that grows, in a node.
export class MarkdownView {
  constructor(node) {
    this.node = node;
    this.node.classList.add("markdown");
    this.at = 0; // where the last block begins
    this.view = null;
    this.kind = "";
    this.line = 0; // start of the last line that has been read
    this.budget = { isSpent: false };
  }

  set(text) {
    for (;;) {
      const block = blockAt(text, this.at, this.line);
      if (!block) return;
      if (this.view === null || this.kind !== block.kind) {
        this.view?.node.remove();
        this.view = block.kind.startsWith("code") ? new CodeView(block.language) : block.kind === "rest" ? new PlainView() : new BlockView();
        this.kind = block.kind;
        this.node.append(this.view.node);
      }
      this.view.set(block.text, this.budget);
      this.line = block.end ?? text.lastIndexOf("\n") + 1;
      if (block.end === null) return;
      this.at = block.end;
      this.view = null;
    }
  }
}

// Returns the block of `text` that begins at `at`: its kind, its text, and where the next block begins, or null if this block may
// continue; null: there is no block. The block does not end before `line`, the start of a line.
function blockAt(text, at, line) {
  while (text[at] === "\n") at += 1;
  if (at >= text.length) return null;
  if (at > MOST_PARSED) return { kind: "rest", text: text.slice(at), end: null };
  const lineEnd = (from) => { const end = text.indexOf("\n", from); return end < 0 ? text.length : end; };
  const first = lineEnd(at), opened = first - at < 200 ? FENCE.exec(text.slice(at, first)) : null;
  const from = Math.min(text.length, first + 1);
  if (opened) {
    const [, mark, language] = opened, kind = `code ${language}`;
    for (let begin = Math.max(from, line); begin < text.length;) {
      const end = lineEnd(begin), here = end - begin < 200 ? text.slice(begin, end).trim() : "";
      if (here.length >= mark.length && here === mark[0].repeat(here.length)) {
        const isOver = end < text.length; // else more marks may follow
        return { kind, language, text: text.slice(from, Math.max(from, begin - 1)), end: isOver ? end + 1 : null };
      }
      begin = end + 1;
    }
    return { kind, language, text: text.slice(from), end: null };
  }
  for (let begin = Math.max(from, line); begin < text.length;) {
    const end = lineEnd(begin);
    const isFence = end - begin < 200 && end < text.length && FENCE.test(text.slice(begin, end));
    const isApart = text[begin - 2] === "\n" && end > begin && !/\s/.test(text[begin]);
    if (isFence || isApart) return { kind: "block", text: text.slice(at, begin), end: begin };
    begin = end + 1;
  }
  return { kind: "block", text: text.slice(at), end: null };
}

// Copies a text to the clipboard, and shows that on the button.
export async function copy(text, button) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
  } catch { // pages over plain HTTP from other machines have no clipboard API
    const area = element("textarea", []);
    area.value = text;
    area.className = "skip";
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    button.focus();
  }
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = label; }, 1500);
}
