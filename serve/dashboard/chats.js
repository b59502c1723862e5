// The conversations of this browser, in its local storage until they are deleted there. If storage is forbidden, they last as
// long as the page; if it is full, the oldest are not stored. API keys are never stored.

const NAME = "apt-jax-chats";
const MOST = 100;

export class Chats {
  constructor() {
    this.all = []; // most recently used first: {id, title, turns: [{role, content, reasoning?}]}
    try {
      const kept = JSON.parse(localStorage.getItem(NAME) ?? "[]");
      if (Array.isArray(kept)) this.all = kept.filter(isChat);
    } catch { /* nothing readable is stored */ }
  }

  begin() { return { id: `${Date.now()}-${Math.random().toString(36).slice(2)}`, title: "", turns: [] }; }

  // Stores a conversation as the most recently used.
  keep(chat) {
    chat.title = (chat.turns[0]?.content ?? "").trim().split("\n")[0].slice(0, 80) || "Empty question";
    this.all = [chat, ...this.all.filter(({ id }) => id !== chat.id)].slice(0, MOST);
    this.write();
  }

  remove(id) {
    this.all = this.all.filter((chat) => chat.id !== id);
    this.write();
  }

  clear() {
    this.all = [];
    this.write();
  }

  write() {
    for (let count = this.all.length; count >= 0; count = count > 1 ? count >> 1 : count - 1) {
      try {
        if (count) localStorage.setItem(NAME, JSON.stringify(this.all.slice(0, count)));
        else localStorage.removeItem(NAME);
        return;
      } catch { /* full: try with fewer */ }
    }
  }
}

function isChat(value) {
  return typeof value?.id === "string" && typeof value.title === "string" && Array.isArray(value.turns)
    && value.turns.every((turn) => ["user", "assistant"].includes(turn?.role) && typeof turn.content === "string" && ["string", "undefined"].includes(typeof turn.reasoning));
}
