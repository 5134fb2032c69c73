// Measures the agent's page once everything is laid out. The test appends this script to a copy of the page.
const box = (it) => {
  const r = it.getBoundingClientRect();
  return [r.left, r.right, r.top, r.bottom];
};
const rgb = (it, name) => getComputedStyle(it)[name].match(/[\d.]+/g).map(Number);
const all = (selector) => [...document.querySelectorAll(selector)];
const visible = (it) => it.checkVisibility() && it.getBoundingClientRect().width > 1;
const background = (it) => {
  const own = rgb(it, "backgroundColor");
  return own.length === 4 && own[3] === 0 ? background(it.parentElement) : own;
};
// Elements that have text of their own.
const texts = all("body *").filter((it) => visible(it) && !["SCRIPT", "STYLE"].includes(it.tagName) &&
  [...it.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim()));
const ink = (it) => rgb(it, it instanceof SVGElement ? "fill" : "color");
const found = {
  dark: matchMedia("(prefers-color-scheme: dark)").matches,
  width: innerWidth,
  scrollWidth: document.documentElement.scrollWidth,
  texts: texts.map((it) => ({ text: it.textContent.trim().slice(0, 60), box: box(it), ink: ink(it), on: background(it),
    px: it instanceof SVGElement ? (12 * it.ownerSVGElement.getBoundingClientRect().width) / it.ownerSVGElement.viewBox.baseVal.width
      : parseFloat(getComputedStyle(it).fontSize) })),
  lines: all(".line").map((it) => ({ ink: rgb(it, "stroke"), on: background(it.closest("figure")) })),
  figures: all("figure svg").map((it) => ({ box: box(it), role: it.getAttribute("role"),
    name: document.getElementById(it.getAttribute("aria-labelledby"))?.textContent ?? "" })),
  buttons: all("main button").map((it) => ({ text: it.textContent, box: box(it) })),
  labels: all("tbody td").map((it) => getComputedStyle(it, "::before").content),
  sections: all("section").map((it) => document.getElementById(it.getAttribute("aria-labelledby"))?.textContent),
  ids: all("[id]").map((it) => it.id),
  dialog: visible(document.querySelector("dialog")),
};
const result = document.createElement("pre");
result.id = "found";
result.hidden = true;
result.textContent = JSON.stringify(found);
parent.document.body.append(result);
