"use strict";
// Replaces the parts of the page that the launcher says have changed.
const source = new EventSource(document.body.dataset.events);
source.onopen = () => document.body.classList.remove("lost");
source.onerror = () => document.body.classList.add("lost");
source.onmessage = (event) => {
  for (const [id, html] of Object.entries(JSON.parse(event.data))) {
    const old = document.getElementById(id);
    if (!old) continue;
    const texts = [...old.querySelectorAll("pre")].map((pre) => [pre.scrollTop, pre.scrollTop + pre.clientHeight + 4 >= pre.scrollHeight]);
    const open = new Set([...old.querySelectorAll("details[open]")].map((part) => part.id));
    old.outerHTML = html;
    const fresh = document.getElementById(id);
    for (const part of fresh.querySelectorAll("details")) if (open.has(part.id)) part.open = true;
    fresh.querySelectorAll("pre").forEach((pre, i) => {
      if (texts[i]) pre.scrollTop = texts[i][1] ? pre.scrollHeight : texts[i][0];
    });
  }
  point();
};
const toEnds = (part) => { for (const pre of part.querySelectorAll("pre.tail")) pre.scrollTop = pre.scrollHeight; };
toEnds(document);
document.addEventListener("toggle", (event) => toEnds(event.target), true);

// Shows the values of a chart at the step below the pointer, also when the chart has just been replaced.
let pointer = null;
const written = (value, unit) => value.toLocaleString("en", { maximumSignificantDigits: 5 }) + (unit ? " " + unit : "");
function point() {
  for (const tip of document.querySelectorAll(".tip")) tip.remove();
  for (const chart of document.querySelectorAll(".chart.pointed")) chart.classList.remove("pointed");
  const field = pointer && document.elementFromPoint(...pointer)?.closest(".field");
  if (!field) return;
  const chart = field.closest(".chart");
  const { low, high, unit, steps, lines } = JSON.parse(chart.dataset.points);
  const box = field.getBoundingClientRect();
  const at = low + ((pointer[0] - box.left) / box.width) * (high - low);
  let i = steps.findIndex((step) => step >= at);
  if (i < 0) i = steps.length - 1;
  if (i > 0 && at - steps[i - 1] < steps[i] - at) i -= 1;
  const share = (steps[i] - low) / (high - low);
  for (const end of ["x1", "x2"]) field.querySelector(".cross").setAttribute(end, 1000 * share);
  chart.classList.add("pointed");
  const tip = chart.querySelector(".plot").appendChild(document.createElement("div"));
  tip.className = "tip";
  const said = lines.map(([name, values]) => (name ? name + "  " : "") + written(values[i], unit));
  tip.textContent = ["step " + steps[i].toLocaleString("en"), ...said.reverse()].join("\n");
  const plot = chart.querySelector(".plot").getBoundingClientRect();
  const x = box.left - plot.left + share * box.width;
  tip.style.left = Math.max(0, x + 10 + tip.offsetWidth > plot.width ? x - 10 - tip.offsetWidth : x + 10) + "px";
}
for (const kind of ["pointermove", "pointerdown"]) {
  document.addEventListener(kind, (event) => { pointer = [event.clientX, event.clientY]; point(); });
}
document.addEventListener("scroll", () => { pointer = null; point(); }, { passive: true });
document.documentElement.addEventListener("pointerleave", () => { pointer = null; point(); });
