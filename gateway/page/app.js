// The page: its tabs, its settings, the composer, and which models there are.

import { getJson, token } from "./api.js";
import { Conversation } from "./chat.js";
import { $, el } from "./dom.js";
import { LoadView } from "./load.js";
import { draw, listed, Recorder, takeDropsAndPastes, takePicture, Tray, WORDS } from "./media.js";

const AGAIN = 2000; // milliseconds after which a gateway that has no model, or does not answer, is asked again
const load = new LoadView();
const tray = new Tray(notice, refresh);
const recorder = new Recorder(add, notice, refresh);
const conversation = new Conversation({ settings, onState: refresh, onFailure });

function notice(text) {
  $("notice").textContent = text;
  $("notice").hidden = !text;
}

function settings() {
  const number = (id) => ($(id).value.trim() === "" ? null : Number($(id).value));
  return {
    model: $("model").value,
    temperature: number("temperature"),
    length: number("length"),
    system: $("system").value.trim(),
  };
}

// What can be done now, as buttons show it.
function refresh() {
  const { busy } = conversation;
  $("stop").hidden = !busy;
  $("ask").disabled = busy || tray.reading > 0;
  $("welcome").hidden = conversation.turns.length > 0 || tray.items.length > 0;
  $("new").hidden = conversation.turns.length === 0;
  for (const button of document.querySelectorAll("[data-do=microphone]")) {
    button.textContent = recorder.recording ? "Stop recording" : "Microphone";
  }
}

// What the chosen model takes, as the page offers it.
function offer() {
  if (recorder.recording) recorder.toggle(); // what was said is kept, where the model takes it
  const kinds = Object.keys(WORDS).filter((kind) => (models.get($("model").value) ?? []).includes(kind));
  tray.kinds = kinds;
  $("files").accept = kinds.map((kind) => `${kind}/*`).join(",");
  $("welcome-title").textContent = kinds.length ? `Ask about ${listed(kinds, "or")}` : "Ask something";
  $("welcome-how").hidden = kinds.length === 0;
  $("question").placeholder = kinds.includes("image") ? "What is in the picture?" : kinds.includes("audio") ? "What is said?" : "Ask something";
  const wanted = { choose: kinds.length > 0, camera: kinds.includes("image"), draw: kinds.includes("image"), microphone: kinds.includes("audio") };
  for (const button of document.querySelectorAll("[data-do]")) button.hidden = !wanted[button.dataset.do];
}

function onFailure(failure) {
  if (failure.status === 401) openSettings("token");
}

// --- models

let asking;
let models = new Map(); // what each takes, by its name

async function findModels() {
  clearTimeout(asking);
  try {
    const { data } = await getJson("v1/models");
    const chosen = $("model").value;
    $("model").replaceChildren(...data.map(({ id }) => el("option", { value: id, selected: id === chosen }, id)));
    $("model").parentElement.hidden = false;
    models = new Map(data.map(({ id, modalities }) => [id, modalities]));
    offer();
    return notice("");
  } catch (error) {
    $("model").parentElement.hidden = !$("model").options.length;
    notice(`${error.message.charAt(0).toUpperCase()}${error.message.slice(1)}. ${error.advice ?? ""}`);
    if (error.status === 401) return openSettings("token");
  }
  asking = setTimeout(findModels, AGAIN);
}

// --- the composer

function fit() {
  const question = $("question");
  question.style.height = "auto";
  question.style.height = `${question.scrollHeight}px`;
}

function ask(event) {
  event.preventDefault();
  const text = $("question").value.trim();
  if (conversation.busy || tray.reading || (!text && !tray.items.length)) return;
  notice("");
  $("question").value = "";
  fit();
  conversation.ask(text, tray.take());
}

async function add(files) {
  notice("");
  select($("tab-chat"));
  await tray.add(files);
  $("question").focus();
}

const ACTIONS = {
  choose: () => $("files").click(),
  camera: () => takePicture(add, notice),
  microphone: () => recorder.toggle(),
  draw: async () => add([await draw()]),
};

for (const button of document.querySelectorAll("[data-do]")) {
  button.addEventListener("click", ACTIONS[button.dataset.do]);
}
for (const input of [$("files"), $("capture")]) {
  input.addEventListener("change", () => {
    add([...input.files]);
    input.value = "";
  });
}
takeDropsAndPastes(add);
$("model").addEventListener("change", offer);
$("composer").addEventListener("submit", ask);
$("question").addEventListener("input", fit);
$("question").addEventListener("keydown", (event) => {
  const sends = event.key === "Enter" && !event.shiftKey && !event.isComposing && !matchMedia("(pointer: coarse)").matches;
  if (sends) ask(event);
});
$("stop").addEventListener("click", () => conversation.stop());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && conversation.busy && !document.querySelector("dialog[open]")) conversation.stop();
});
$("new").addEventListener("click", () => {
  conversation.clear();
  refresh();
  $("question").focus();
});

// --- settings

function openSettings(field) {
  if (!$("settings").open) $("settings").showModal();
  if (field) $(field).focus();
}

const KEPT = ["temperature", "length", "system"];
for (const id of KEPT) $(id).value = sessionStorage.getItem(`twinlens-${id}`) ?? "";
$("token").value = token.get();
$("open-settings").addEventListener("click", () => openSettings());
$("settings").addEventListener("submit", (event) => {
  event.preventDefault();
  $("settings").close();
});
$("settings").addEventListener("close", () => {
  for (const id of KEPT) sessionStorage.setItem(`twinlens-${id}`, $(id).value);
  token.set($("token").value.trim());
  findModels();
});

// --- tabs

const tabs = [$("tab-chat"), $("tab-load")];

function select(tab) {
  for (const each of tabs) {
    each.setAttribute("aria-selected", String(each === tab));
    each.tabIndex = each === tab ? 0 : -1;
    $(each.getAttribute("aria-controls")).hidden = each !== tab;
  }
  watch();
}

// The services are looked at for as long as somebody sees them.
function watch() {
  if (!$("load").hidden && document.visibilityState === "visible") load.start();
  else load.stop();
}

for (const tab of tabs) {
  tab.addEventListener("click", () => select(tab));
  tab.addEventListener("keydown", (event) => {
    const next = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    const at = Number.isFinite(next) ? (tabs.indexOf(tab) + next + tabs.length) % tabs.length : next < 0 ? 0 : tabs.length - 1;
    select(tabs[at]);
    tabs[at].focus();
  });
}
document.addEventListener("visibilitychange", watch);

refresh();
findModels();
$("question").focus();
