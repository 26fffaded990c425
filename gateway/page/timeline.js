// Where an answer's time went: a row for each stage, drawn when it happened, so that one sees what ran at the same time.

import { count, el, milliseconds, svg } from "./dom.js";

const STAGES = {
  prompt: ["Chat template"],
  hash: ["Content key"],
  encode_header: ["Header", "waiting"],
  prefill_elsewhere: ["Prefill elsewhere", "waiting"],
  encoder_fetch: ["Fetch"],
  encoder_hash: ["Content key"],
  encoder_shared: ["Shared store"],
  encoder_inspect: ["Inspect"],
  encoder_decode: ["Decode file"],
  encoder_room: ["Room", "waiting"],
  encoder_queue: ["Queue", "waiting"],
  encoder_preprocess: ["Patches"],
  encoder_vit: ["ViT"],
  encoder_transfer: ["Transfer"],
  landing: ["Landing", "waiting"],
  queue: ["Queue", "waiting"],
  rows: ["Rows awaited", "waiting"],
  prefill: ["Prefill"],
  first_token: ["First token", "waiting"],
  decode_tokens: ["Decode"],
};
const LEAST_SECONDS = 5e-5;

// One stage as it is drawn; a stage of which nobody said when it was is not.
function row({ stage, seconds, start_seconds: start, end_seconds: end }) {
  const encoder = stage.startsWith("encoder_");
  const [label, kind] = STAGES[stage] ?? [stage.replace(/^encoder_/, "").replaceAll("_", " ")];
  return { label, seconds, start, end, kind: kind ?? (encoder ? "encoder" : "llm"), service: encoder ? "Encoder" : "LLM" };
}

export function timeline({ stages, media }, usage) {
  const rows = stages
    .filter(({ seconds, start_seconds: start }) => seconds >= LEAST_SECONDS && start !== null)
    .map(row)
    .sort((one, other) => one.start - other.start || one.end - other.end);
  const total = Math.max(...rows.map(({ end }) => end), 1e-3);
  const first = stages.find(({ stage }) => stage === "first_token")?.end_seconds ?? null;
  return el(
    "details",
    { class: "timeline", open: true },
    el("summary", {}, ...facts(stages, media, usage, first)),
    el(
      "table",
      {},
      el("caption", { class: "unseen" }, "Where the time went, by stage"),
      el(
        "thead",
        {},
        el("tr", {}, el("th", { scope: "col" }, "Stage"), el("td", {}, axis(total)), el("th", { scope: "col" }, "Time")),
      ),
      el("tbody", {}, ...rows.map((each) => drawn(each, total, first))),
    ),
    el(
      "p",
      { class: "legend" },
      ...[["encoder", "encoder"], ["llm", "LLM service"], ["waiting", "waiting for what runs meanwhile"]].map(([kind, words]) =>
        el("span", {}, svg("svg", { width: 12, height: 12, "aria-hidden": "true" }, svg("rect", { class: kind, width: 12, height: 12, rx: 3 })), ` ${words}`),
      ),
    ),
  );
}

function facts(stages, media, usage, first) {
  const decode = stages.find(({ stage }) => stage === "decode_tokens")?.seconds;
  const more = usage.completion_tokens - 1;
  const cached = usage.prompt_tokens_details.cached_tokens;
  const told = [
    first !== null && `first token after ${milliseconds(first)}`,
    `${count(usage.completion_tokens)} token${more ? "s" : ""}${more > 0 && decode ? `, ${(more / decode).toFixed(1)}/s` : ""}`,
    `${count(cached)} of ${count(usage.prompt_tokens)} prompt tokens cached`,
    media.length > 0 && encoderSaid(stages, media),
  ];
  return told.filter(Boolean).flatMap((fact, index) => [index ? " · " : "", el("span", {}, fact)]);
}

function encoderSaid(stages, media) {
  if (stages.some(({ stage, seconds }) => stage === "encoder_vit" && seconds > 0)) return "the encoder ran";
  return media.every(({ cached }) => cached) ? "the encoder had it already" : "the encoder did not run";
}

const percent = (value, total) => `${((100 * value) / total).toFixed(2)}%`;

function axis(total) {
  const step = [1, 2, 5].flatMap((digit) => [-4, -3, -2, -1, 0, 1, 2].map((power) => digit * 10 ** power)).sort((a, b) => a - b)
    .find((size) => total / size <= 4.5) ?? total;
  const ticks = [];
  for (let at = 0; at < total * 0.93; at += step) {
    ticks.push(svg("text", { x: percent(at, total), y: 12 }, at === 0 ? "0" : milliseconds(at).replace(/\.0+ /, " ")));
  }
  return svg("svg", { class: "axis", width: "100%", height: 16, "aria-hidden": "true" }, ...ticks);
}

function drawn({ label, seconds, start, end, kind, service }, total, first) {
  const from = Math.max(0, start);
  const bar = svg("rect", { class: kind, x: percent(from, total), y: 2, height: 12, rx: 3 });
  bar.style.setProperty("width", `max(2px, ${percent(Math.max(0, end - from), total)})`);
  const mark = first !== null && svg("line", { class: "mark", x1: percent(first, total), x2: percent(first, total), y1: 0, y2: 16 });
  return el(
    "tr",
    {},
    el("th", { scope: "row" }, label, el("small", {}, ` ${service}`)),
    el("td", {}, svg("svg", { width: "100%", height: 16, "aria-hidden": "true" }, mark, bar)),
    el("td", {}, milliseconds(seconds)),
  );
}
