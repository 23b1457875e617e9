"use strict";
// The marks of every SVG in a figure: what has a title, and each point of a line without dots. The one
// nearest to the pointer, or chosen with the arrow keys, is told in words below.
for (const svg of document.querySelectorAll("figure svg")) {
  const details = svg.closest("figure").querySelector(".details");
  const more = svg.querySelector("[data-more]") ? "; click it, or press Enter, for more" : "";
  const hint = `Point at a mark, or choose one with the arrow keys${more}.`;
  const ring = document.createElementNS(svg.namespaceURI, "circle");
  for (const [name, value] of Object.entries({ r: 5, fill: "none", class: "on", "pointer-events": "none" })) {
    ring.setAttribute(name, value);
  }
  let marks = null, at = -1;

  function found() {
    if (marks) return marks;
    marks = [];
    for (const shape of svg.querySelectorAll("[data-values]")) {
      const values = shape.dataset.values.split("; "), points = [...shape.points];
      points.forEach(({ x, y }, i) => marks.push({ x, y, words: `${shape.dataset.name}: ${values[i]}` }));
    }
    for (const title of svg.querySelectorAll(":scope * > title")) {
      const shape = title.parentNode, box = shape.getBBox();
      marks.push({ shape, box, x: box.x + box.width / 2, y: box.y + box.height / 2, words: title.textContent });
    }
    return marks;
  }

  function tell(next) {
    if (at >= 0) marks[at].shape?.classList.remove("on");
    ring.remove();
    at = next;
    details.textContent = at < 0 ? hint : marks[at].words;
    if (at < 0) return;
    if (marks[at].shape && marks[at].shape.tagName !== "circle") marks[at].shape.classList.add("on");
    else {
      ring.setAttribute("cx", marks[at].x);
      ring.setAttribute("cy", marks[at].y);
      svg.append(ring);
    }
  }

  // How far a mark is from a point of the drawing: 0 inside its box.
  function away(mark, x, y) {
    if (!mark.box) return Math.hypot(mark.x - x, mark.y - y);
    const { x: left, y: top, width, height } = mark.box;
    return Math.hypot(Math.max(left - x, 0, x - left - width), Math.max(top - y, 0, y - top - height));
  }

  function explain() {
    const more = at >= 0 && marks[at].shape?.dataset.more;
    if (more) details.textContent = `${marks[at].words}\n${more}`;
  }

  svg.setAttribute("tabindex", 0);
  svg.addEventListener("click", explain);
  svg.addEventListener("pointermove", (event) => {
    const here = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    let best = -1, least = 24;
    found().forEach((mark, i) => {
      const far = away(mark, here.x, here.y);
      if (far <= least) { least = far; best = i; } // of two the one that is drawn on top
    });
    if (best !== at) tell(best);
  });
  const last = () => found().length - 1;
  const steps = {
    ArrowRight: () => Math.min(at + 1, last()), ArrowLeft: () => Math.max(at - 1, 0), Home: () => 0, End: last,
    ArrowDown: () => Math.min(at + 10, last()), ArrowUp: () => Math.max(at - 10, 0), Escape: () => -1,
  };
  svg.addEventListener("keydown", (event) => {
    if (event.key === "Enter") explain();
    if (!steps[event.key] || event.ctrlKey || event.metaKey || event.altKey || last() < 0) return;
    event.preventDefault();
    tell(steps[event.key]());
  });
  details.textContent = hint;
}
