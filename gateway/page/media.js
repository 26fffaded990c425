// Pictures, videos and sounds: chosen, dropped, pasted, taken by camera or microphone, or drawn; until they are asked about,
// in the tray.

import { $, bytes, el } from "./dom.js";

export const WORDS = { image: "a picture", video: "a video", audio: "a sound" };
const LABELS = { image: "Picture", video: "Video", audio: "Sound" };

export function listed(kinds, last) {
  const words = kinds.map((kind) => WORDS[kind]);
  return words.length > 1 ? `${words.slice(0, -1).join(", ")} ${last} ${words.at(-1)}` : words.join("");
}

const kindOf = (file) => /^(image|video|audio)\/[\w.+-]+$/.exec(file.type)?.[1];

// One file: `shown` is an address for this page, `url` the whole file as an address, in a blob, which is what is sent.
async function read(file) {
  const kind = kindOf(file);
  const url = await new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
  return { kind, name: file.name || kind, size: file.size, url: new Blob([url]), shown: URL.createObjectURL(file) };
}

export const part = ({ kind, url }) => ({ type: `${kind}_url`, [`${kind}_url`]: { url } });

// What it looks like; of what this browser cannot show, its name.
export function thumbnail(item) {
  const label = `${LABELS[item.kind]} ${item.name}`;
  const onerror = (event) => event.target.replaceWith(el("span", { class: "file" }, label));
  const played = { src: item.shown, controls: true, preload: "metadata", "aria-label": label, onerror };
  if (item.kind === "video") return el("video", { ...played, muted: true, playsinline: true });
  return item.kind === "audio" ? el("audio", played) : el("img", { src: item.shown, alt: label, onerror });
}

export class Tray {
  constructor(onProblem, onChange) {
    this.items = [];
    this.reading = 0;
    this.kinds = Object.keys(WORDS); // what the model takes
    this.onProblem = onProblem;
    this.onChange = onChange;
  }

  async add(files) {
    this.reading++;
    try {
      for (const file of files) {
        if (this.kinds.includes(kindOf(file))) this.items.push(await read(file));
        else this.onProblem(this.refusal(file.name || "That"));
      }
    } catch {
      this.onProblem("A file could not be read.");
    } finally {
      this.reading--;
      this.show();
    }
  }

  refusal(name) {
    if (!this.kinds.length) return "This model takes text alone.";
    return `${name} is ${this.kinds.length > 1 ? "neither" : "not"} ${listed(this.kinds, "nor")}.`;
  }

  // Everything in it; it is empty then.
  take() {
    const items = this.items;
    this.items = [];
    this.show();
    return items;
  }

  remove(item) {
    this.items = this.items.filter((each) => each !== item);
    URL.revokeObjectURL(item.shown);
    this.show();
    $("question").focus();
  }

  show() {
    $("tray").replaceChildren(
      ...this.items.map((item) =>
        el(
          "li",
          {},
          thumbnail(item),
          el("small", {}, bytes(item.size)),
          el("button", { type: "button", "aria-label": `Remove ${item.name}`, onclick: () => this.remove(item) }, "×"),
        ),
      ),
    );
    this.onChange();
  }
}

// Files that are dropped anywhere, or pasted.
export function takeDropsAndPastes(add) {
  let depth = 0;
  const show = (change) => {
    depth = change === 0 ? 0 : Math.max(0, depth + change);
    $("drop").hidden = depth === 0;
  };
  const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
  document.addEventListener("dragenter", (event) => hasFiles(event) && show(1));
  document.addEventListener("dragleave", (event) => hasFiles(event) && show(-1));
  document.addEventListener("dragover", (event) => hasFiles(event) && event.preventDefault());
  document.addEventListener("drop", (event) => {
    show(0);
    if (!hasFiles(event)) return;
    event.preventDefault();
    add([...event.dataTransfer.files]);
  });
  document.addEventListener("paste", (event) => {
    const files = [...(event.clipboardData?.files ?? [])];
    if (files.length) {
      event.preventDefault();
      add(files);
    }
  });
}

// A picture by the camera: in a window of its own where the browser lets this page see through it, else by the system.
export async function takePicture(add, onProblem) {
  if (!navigator.mediaDevices) return $("capture").click();
  let stream;
  try {
    stream = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment" } });
  } catch {
    return onProblem("The camera cannot be used.");
  }
  const viewfinder = $("viewfinder");
  const dialog = $("camera");
  viewfinder.srcObject = stream;
  await viewfinder.play();
  dialog.addEventListener("close", () => stream.getTracks().forEach((track) => track.stop()), { once: true });
  $("camera-close").onclick = () => dialog.close();
  $("shoot").onclick = async () => {
    const canvas = el("canvas", { width: viewfinder.videoWidth, height: viewfinder.videoHeight });
    canvas.getContext("2d").drawImage(viewfinder, 0, 0);
    add([await asFile(canvas, "camera.jpg", "image/jpeg")]);
    dialog.close();
  };
  dialog.showModal();
}

const RECORDED = { "audio/webm": "webm", "audio/mp4": "m4a", "audio/ogg": "ogg" };

// A sound by the microphone: from one press of a button to the next.
export class Recorder {
  constructor(add, onProblem, onChange) {
    Object.assign(this, { add, onProblem, onChange });
  }

  get recording() {
    return this.recorder !== undefined;
  }

  async toggle() {
    if (this.recording) return this.recorder.stop();
    if (this.asking) return;
    this.asking = true; // the user, who may press again meanwhile
    let stream;
    try {
      stream = await navigator.mediaDevices.getUserMedia({ audio: true });
      this.record(stream);
    } catch {
      stream?.getTracks().forEach((track) => track.stop());
      this.onProblem("The microphone cannot be used.");
    } finally {
      this.asking = false;
    }
    this.onChange();
  }

  record(stream) {
    const type = Object.keys(RECORDED).find((each) => MediaRecorder.isTypeSupported(each));
    const parts = [];
    const recorder = new MediaRecorder(stream, { mimeType: type });
    recorder.addEventListener("dataavailable", (event) => parts.push(event.data));
    recorder.addEventListener("stop", () => {
      stream.getTracks().forEach((track) => track.stop());
      this.recorder = undefined;
      this.onChange();
      this.add([new File(parts, `recording.${RECORDED[type]}`, { type })]);
    });
    recorder.start();
    this.recorder = recorder;
  }
}

const COLOURS = { red: "#dc322f", green: "#28a03c", blue: "#285ad2", yellow: "#e6c814", purple: "#8c3cb4" };

// A picture of two shapes, of which even a small model knows the names.
export async function draw() {
  const canvas = el("canvas", { width: 320, height: 224 });
  const pen = canvas.getContext("2d");
  pen.fillStyle = "#fafafa";
  pen.fillRect(0, 0, 320, 224);
  const colours = shuffled(Object.values(COLOURS));
  shuffled(["circle", "square", "triangle"]).slice(0, 2).forEach((shape, index) => {
    pen.fillStyle = colours[index];
    pen.beginPath();
    trace(pen, shape, 90 + 140 * index, 112, 48);
    pen.fill();
  });
  return asFile(canvas, "drawing.png", "image/png");
}

function trace(pen, shape, x, y, radius) {
  if (shape === "circle") pen.arc(x, y, radius, 0, 2 * Math.PI);
  else if (shape === "square") pen.rect(x - radius, y - radius, 2 * radius, 2 * radius);
  else {
    pen.moveTo(x, y - radius);
    pen.lineTo(x + radius, y + radius);
    pen.lineTo(x - radius, y + radius);
  }
}

function shuffled(list) {
  return list.map((value) => [Math.random(), value]).sort(([a], [b]) => a - b).map(([, value]) => value);
}

function asFile(canvas, name, type) {
  return new Promise((resolve) => canvas.toBlob((blob) => resolve(new File([blob], name, { type })), type));
}
