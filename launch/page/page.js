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
};
for (const pre of document.querySelectorAll("pre.tail")) pre.scrollTop = pre.scrollHeight;
