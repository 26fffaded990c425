// Both services, live: what waits and runs, what caches hold and give, and how fast it goes.

import { getJson } from "./api.js";
import { $, bytes, count, el, share, svg } from "./dom.js";

const EVERY = 1000; // milliseconds from one look to the next
const KEPT = 60; // looks that are drawn

export class LoadView {
  constructor() {
    this.cards = new Map();
    this.running = false;
  }

  // Looks again and again until it is told to stop; what is not looked at is not asked for.
  start() {
    if (this.running) return;
    this.running = true;
    this.look();
  }

  stop() {
    this.running = false;
    clearTimeout(this.timer);
    this.aborting?.abort();
  }

  async look() {
    this.aborting = new AbortController();
    try {
      const { services } = await getJson("v1/twinlens/load", this.aborting.signal);
      if (this.running) this.show(services);
    } catch (error) {
      if (error.name !== "AbortError") $("load-state").textContent = `No news: ${error.message}. ${error.advice ?? ""}`;
    }
    if (this.running) this.timer = setTimeout(() => this.look(), EVERY);
  }

  show(services) {
    const now = performance.now() / 1000;
    const usable = services.filter((service) => service.usable).length;
    const state = `${usable} of ${services.length} LLM services can be used`;
    if ($("load-state").textContent !== state) $("load-state").textContent = state;
    const encoders = new Map();
    for (const encoder of services.flatMap((service) => service.load?.encoders ?? [])) {
      const known = encoders.get(encoder.address);
      encoders.set(encoder.address, known ? both(known, encoder) : encoder);
    }
    this.fill($("llms"), services, "llm", (service) => service.address, ofLlm, now);
    this.fill($("encoders"), [...encoders.values()], "encoder", (encoder) => encoder.address, ofEncoder, now);
  }

  fill(place, entries, kind, address, figures, now) {
    const cards = entries.map((entry) => {
      const id = `${kind} ${address(entry)}`;
      if (!this.cards.has(id)) this.cards.set(id, new Card(address(entry), kind));
      const card = this.cards.get(id);
      card.show(figures(entry, card.rates(entry.load ?? entry, now)), entry);
      return card.element;
    });
    if (cards.length !== place.children.length || cards.some((card, index) => place.children[index] !== card)) {
      place.replaceChildren(...cards);
    }
  }
}

// One encoder as two LLM services see it.
function both(one, other) {
  return { ...one, usable: one.usable || other.usable, in_flight: one.in_flight + other.in_flight };
}

// What a card shows, in order: [label, text], with a history {value} or a meter {part, whole}.
function ofLlm({ load, model, devices, in_flight: inFlight }, rates) {
  if (!load) return [];
  const known = { running: load.running, waiting: load.waiting };
  return [
    ["Model", `${model}${devices.length ? ` on ${devices.join(", ")}` : ""}`],
    ["Tokens/s", count(rates.generated_tokens), { value: rates.generated_tokens }],
    ["Prompt tokens/s", count(rates.prompt_tokens), { value: rates.prompt_tokens }],
    ["Running, waiting", `${count(known.running)}, ${count(known.waiting)}`, { value: known.running + known.waiting }],
    ["From this gateway", count(inFlight)],
    ["KV blocks in use", `${count(load.kv_blocks_used)} of ${count(load.kv_blocks_total)}, ${count(load.kv_blocks_cached)} more cached`,
      { part: load.kv_blocks_used, also: load.kv_blocks_cached, whole: load.kv_blocks_total }],
    load.kv_host_blocks_total > 0 && ["KV blocks on the host", `${count(load.kv_host_blocks_used)} of ${count(load.kv_host_blocks_total)}`,
      { part: load.kv_host_blocks_used, whole: load.kv_host_blocks_total }],
    ["Prefix cache hits", `${share(load.prefix_hit_tokens, load.prefix_query_tokens)} of tokens`,
      { part: load.prefix_hit_tokens, whole: load.prefix_query_tokens }],
    ["Rows held", `${bytes(load.row_bytes)} of ${bytes(load.row_capacity_bytes)}`, { part: load.row_bytes, whole: load.row_capacity_bytes }],
    ["Rows received", count(load.rows_received)],
    ["Items not asked for", `${count(load.row_hits)} were here, ${count(load.items_covered)} cached as prompt`],
    ["Requests", `${count(load.finished_requests)} finished, ${count(load.failed_requests)} failed, ${count(load.cancelled_requests)} given up`],
  ].filter(Boolean);
}

function ofEncoder(encoder, rates) {
  const asked = encoder.store_hits + encoder.store_misses;
  const way = encoder.cuda_ipc ? "GPU memory" : encoder.shared_memory ? "shared memory" : encoder.nixl ? "NIXL" : "the network";
  return [
    ["Rows go by", way],
    ["Computed items/s", rates.store_misses.toFixed(1), { value: rates.store_misses }],
    ["Running, queued", `${count(encoder.running_items)}, ${count(encoder.queued_items)}`, { value: encoder.running_items + encoder.queued_items }],
    ["From these LLM services", count(encoder.in_flight)],
    ["ViT passes", count(encoder.vit_calls)],
    ["Store hits", `${share(encoder.store_hits, asked)} of ${count(asked)} items`, { part: encoder.store_hits, whole: asked }],
    ["Store", `${bytes(encoder.store_bytes)} of ${bytes(encoder.store_capacity_bytes)}`, { part: encoder.store_bytes, whole: encoder.store_capacity_bytes }],
    encoder.failures > 0 && ["Streams that broke", count(encoder.failures)],
  ].filter(Boolean);
}

// A service: its figures change in place.
class Card {
  constructor(address, kind) {
    this.kind = kind;
    this.state = el("span", { class: "state" });
    this.list = el("dl");
    this.element = el("article", { class: "card", "aria-label": address }, el("h4", {}, address, " ", this.state), this.list);
    this.rows = new Map();
    this.before = null;
  }

  // How fast the counters grow, a second, since the last look.
  rates(counters, now) {
    const { before } = this;
    this.before = { counters, now };
    const rate = (name) => {
      const grown = before && counters && before.counters ? counters[name] - before.counters[name] : 0;
      return grown > 0 ? grown / (now - before.now) : 0;
    };
    return new Proxy({}, { get: (_, name) => rate(name) });
  }

  show(figures, { usable }) {
    this.state.textContent = usable ? "usable" : "not usable";
    this.state.className = usable ? "state good" : "state bad";
    for (const [label, text, drawing = {}] of figures) {
      const row = this.rows.get(label) ?? this.add(label, drawing);
      row.text.textContent = text;
      row.draw?.(drawing);
    }
    this.list.hidden = figures.length === 0;
  }

  add(label, drawing) {
    const text = el("span");
    const kind = "value" in drawing ? history(this.kind) : "whole" in drawing ? meter(this.kind) : null;
    this.list.append(el("div", {}, el("dt", {}, label), el("dd", { class: "value" in drawing && "beside" }, text, kind?.element)));
    const row = { text, draw: kind?.draw };
    this.rows.set(label, row);
    return row;
  }
}

// The last minute as a line.
function history(kind) {
  const values = [];
  const line = svg("polyline", { class: kind });
  const element = svg("svg", { class: "history", viewBox: "0 0 120 24", preserveAspectRatio: "none", "aria-hidden": "true" }, line);
  const draw = ({ value }) => {
    values.push(value);
    if (values.length > KEPT) values.shift();
    const most = Math.max(...values, 1e-9);
    const first = KEPT - values.length;
    line.setAttribute("points", values.map((each, index) => `${((first + index) * 120) / (KEPT - 1)},${23 - (22 * each) / most}`).join(" "));
  };
  return { element, draw };
}

// A part of a whole as a bar, and beside it what could become part of it.
function meter(kind) {
  const part = svg("rect", { class: kind, height: 6, rx: 3 });
  const also = svg("rect", { class: `${kind} also`, height: 6, rx: 3 });
  const ground = svg("rect", { class: "ground", width: "100%", height: 6, rx: 3 });
  const element = svg("svg", { class: "meter", width: "100%", height: 6, "aria-hidden": "true" }, ground, also, part);
  const width = (value, whole) => `${whole > 0 ? Math.min(100, (100 * value) / whole).toFixed(2) : 0}%`;
  const draw = ({ part: value, also: more = 0, whole }) => {
    part.setAttribute("width", width(value, whole));
    also.setAttribute("width", width(value + more, whole));
  };
  return { element, draw };
}
