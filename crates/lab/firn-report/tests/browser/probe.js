// Measures the page once everything is laid out. The test appends this script to a copy of the page.
const box = (it) => {
  const r = it.getBoundingClientRect();
  return [r.left, r.right, r.top, r.bottom];
};
const rgb = (it, name) => getComputedStyle(it)[name].match(/[\d.]+/g).map(Number);
const texts = (selector, root = document) => [...root.querySelectorAll(selector)].map((it) => it.textContent);
const described = (svg, name) => {
  const it = document.getElementById(svg.getAttribute(name));
  return it && svg.contains(it) ? it.textContent : "";
};
const points = (line) => line.getAttribute("points").split(" ").filter(Boolean).map((it) => it.split(",").map(Number));
const figure = (it) => {
  const svg = it.querySelector("svg");
  return {
    title: it.querySelector("figcaption").textContent,
    role: svg.getAttribute("role"),
    name: described(svg, "aria-labelledby"),
    text: described(svg, "aria-describedby"),
    box: box(svg),
    legend: box(it.querySelector(".legend")),
    names: texts(".legend li", it),
    labels: [...svg.querySelectorAll("text")].map(box),
    fontPx: (12 * svg.getBoundingClientRect().width) / svg.viewBox.baseVal.width,
    ends: [svg.dataset.xEnd, svg.dataset.yEnd].map(Number),
    lines: [...svg.querySelectorAll("polyline")].map((line) => ({ name: line.dataset.name, points: points(line) })),
    colors: [...svg.querySelectorAll(".line, .dots, .strip")].map((mark) => rgb(mark, "stroke")),
  };
};
const found = {
  dark: matchMedia("(prefers-color-scheme: dark)").matches,
  width: innerWidth,
  scrollWidth: document.documentElement.scrollWidth,
  canvas: rgb(document.body, "backgroundColor"),
  inks: ["h1", ".headline", ".subline", ".mode", "td", "figcaption"].map((it) => rgb(document.querySelector(it), "color")),
  svgInk: rgb(document.querySelector("svg text"), "fill"),
  headlines: texts(".headline"),
  sublines: texts(".subline"),
  figures: [...document.querySelectorAll("figure")].map(figure),
  head: texts("thead th"),
  rows: [...document.querySelectorAll("tbody tr")].map((row) => [...row.cells].map((cell) => cell.textContent)),
  facts: JSON.parse(document.getElementById("facts").textContent),
  loaded: performance.getEntriesByType("resource").map((it) => it.name),
};
const result = document.createElement("pre");
result.id = "found";
result.hidden = true;
result.textContent = JSON.stringify(found);
parent.document.body.append(result);
