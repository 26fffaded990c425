// A conversation: its turns, on the page and as they are sent, one of which at most is being answered.

import { chat, Failure } from "./api.js";
import { $, el } from "./dom.js";
import { part, thumbnail } from "./media.js";
import { timeline } from "./timeline.js";

const NEAR = 80; // pixels from the end of the page within which a reader follows an answer

function name() {
  return [...crypto.getRandomValues(new Uint8Array(8))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

export class Conversation {
  // `settings()` says how to ask; `onState(busy)` hears when an answer begins and when it ends; `onFailure(failure)` of failures.
  constructor({ settings, onState, onFailure }) {
    Object.assign(this, { settings, onState, onFailure });
    this.clear();
  }

  get busy() {
    return this.aborting !== undefined;
  }

  clear() {
    this.aborting?.abort();
    this.name = `page-${name()}`;
    for (const item of this.turns?.flatMap((turn) => turn.media) ?? []) URL.revokeObjectURL(item.shown);
    this.turns = [];
    $("turns").replaceChildren();
  }

  ask(text, media) {
    const turn = { text, media, answer: "", failed: false };
    turn.view = view(turn, { retry: () => this.retry(turn), copy: () => copy(turn) });
    this.turns.at(-1)?.view.retry.setAttribute("hidden", "");
    this.turns.push(turn);
    $("turns").append(turn.view.item);
    return this.answer(turn);
  }

  retry(turn) {
    return this.busy ? undefined : this.answer(turn);
  }

  stop() {
    this.aborting?.abort();
  }

  // The messages up to a turn's question; turns without an answer are left out.
  messages(until) {
    const { system } = this.settings();
    const messages = system ? [{ role: "system", content: system }] : [];
    for (const turn of this.turns) {
      const words = turn.text ? [{ type: "text", text: turn.text }] : [];
      const asked = { role: "user", content: [...turn.media.map(part), ...words] };
      if (turn === until) return [...messages, asked];
      if (turn.answer) messages.push(asked, { role: "assistant", content: turn.answer });
    }
    return messages;
  }

  body(turn) {
    const { model, temperature, length } = this.settings();
    return {
      messages: this.messages(turn),
      prompt_cache_key: this.name,
      stream: true,
      stream_options: { include_usage: true, include_timings: true },
      ...(model && { model }),
      ...(temperature !== null && { temperature }),
      ...(length !== null && { max_completion_tokens: length }),
    };
  }

  async answer(turn) {
    const aborting = (this.aborting = new AbortController());
    const { view } = turn;
    turn.answer = "";
    view.begin();
    this.onState(true);
    try {
      for await (const chunk of chat(this.body(turn), aborting.signal)) {
        const delta = chunk.choices[0]?.delta;
        if (delta?.reasoning_content) view.think(delta.reasoning_content);
        if (delta?.content) {
          turn.answer += delta.content;
          view.say(delta.content);
        }
        if (chunk.choices[0]?.finish_reason === "length") view.note("It was cut at the longest length.");
        if (chunk.timings) view.measured(timeline(chunk.timings, chunk.usage));
      }
      announce(turn.answer);
    } catch (error) {
      if (aborting.signal.aborted) view.note("Stopped.");
      else this.failed(turn, error);
    } finally {
      view.end();
      if (this.aborting === aborting) this.aborting = undefined;
      if (!this.busy) this.onState(false);
    }
  }

  failed(turn, error) {
    const failure = error instanceof Failure ? error : new Failure("this page failed to read the answer");
    if (!(error instanceof Failure)) console.error(error);
    turn.view.fail(failure);
    this.onFailure(failure);
  }
}

// Screen readers hear an answer once it is whole.
function announce(text) {
  $("said").textContent = text;
}

async function copy(turn) {
  if (navigator.clipboard) await navigator.clipboard.writeText(turn.answer);
  else {
    getSelection().selectAllChildren(turn.view.words);
    document.execCommand("copy"); // pages that are not served over TLS have no other way
  }
  announce("Copied");
}

// A turn on the page.
function view(turn, { retry, copy }) {
  const thoughts = el("p", { class: "words" });
  const thinking = el("details", { class: "thinking", hidden: true }, el("summary", {}, "Reasoning"), thoughts);
  const words = el("p", { class: "words" });
  const notes = el("div", { class: "notes" });
  const again = el("button", { type: "button", class: "plain", onclick: retry }, "Retry");
  const taken = el("button", { type: "button", class: "plain", onclick: copy }, "Copy");
  const tools = el("p", { class: "tools", hidden: true }, taken, again);
  const measured = el("div");
  const answer = el("article", { class: "answer", "aria-label": "Answer" }, thinking, words, notes, tools, measured);
  const thumbnails = turn.media.length ? el("div", { class: "thumbnails" }, ...turn.media.map(thumbnail)) : null;
  const question = el("article", { class: "question", "aria-label": "Question" }, thumbnails, turn.text ? el("p", { class: "words" }, turn.text) : null);

  const following = (change) => {
    const page = document.scrollingElement;
    const follow = page.scrollHeight - page.scrollTop - page.clientHeight < NEAR;
    change();
    if (follow) page.scrollTop = page.scrollHeight;
  };

  return {
    item: el("li", {}, question, answer),
    words,
    retry: again,
    begin() {
      for (const part of [words, thoughts, notes, measured]) part.replaceChildren();
      thinking.hidden = tools.hidden = true;
      answer.setAttribute("aria-busy", "true");
      answer.scrollIntoView({ block: "end" });
    },
    say: (text) => following(() => words.append(text)),
    think: (text) =>
      following(() => {
        thinking.hidden = false;
        thoughts.append(text);
      }),
    note: (text) => following(() => notes.append(el("p", { class: "note" }, text))),
    fail: (failure) =>
      following(() => {
        const message = failure.message.charAt(0).toUpperCase() + failure.message.slice(1);
        notes.append(
          el(
            "div",
            { class: "failure", role: "alert" },
            el("p", {}, el("strong", {}, `${message}.`), failure.advice ? ` ${failure.advice}` : ""),
            failure.code ? el("small", {}, failure.code, failure.param ? ` · ${failure.param}` : "") : null,
          ),
        );
      }),
    measured: (chart) => following(() => measured.replaceChildren(chart)),
    end: () =>
      following(() => {
        answer.removeAttribute("aria-busy");
        tools.hidden = false;
        taken.hidden = !turn.answer;
      }),
  };
}
