// Elements, made without markup of any text, and numbers as people read them.

const SVG = "http://www.w3.org/2000/svg";

export const $ = (id) => document.getElementById(id);

// An element with attributes, listeners ({onclick: f}) and children; null, undefined and false are left out, and true is an
// attribute without a value.
export function el(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function milliseconds(seconds) {
  const value = seconds * 1000;
  if (value >= 10_000) return `${seconds.toFixed(1)} s`;
  return `${value >= 100 ? value.toFixed(0) : value >= 1 ? value.toFixed(1) : value.toFixed(2)} ms`;
}

export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; count >= 1024 && unit < units.length - 1; unit++) count /= 1024;
  return `${count >= 10 || unit === 0 ? count.toFixed(0) : count.toFixed(1)} ${units[unit]}`;
}

export const count = (number) => Math.round(number).toLocaleString("en");

export const share = (part, whole) => (whole > 0 ? `${Math.round((100 * part) / whole)} %` : "–");
