// The page: fields, what Python answered, and the address that says what is asked.
"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const FIELDS = ["layout", "shape", "device", "batch", "sequence", "config", "operations"];
  const DEFAULTS = { layout: "dp2 pp2 tp2 zero1 1f1b:8", shape: "8b", device: "h100", batch: "16", sequence: "", config: "", operations: "" };
  const EXAMPLES = [
    "dp8 zero3 accum:2 recompute:all", "pp4 tp2 1f1b:8", "pp8 zb-h1:16", "pp4 tp2 interleaved2:8",
    "dp2 tp4 seq zero1 accum:8", "cp4 tp2 seq accum:8 recompute:selective",
  ];
  const own = Object.assign({}, DEFAULTS);
  let number = 0, worker = null, timer = 0;

  async function start() {
    worker = await startPython(heard, failed);
    ask();
  }

  function failed(why) {
    $("state").textContent = "";
    wrong(`Python did not start: ${why}. The page needs a browser with WebAssembly and workers.`);
  }

  // ---- asking
  function ask() {
    const model = own.config.trim() || own.shape;
    const count = (text) => Math.max(0, Math.min(1e9, Math.round(Number(text.replaceAll(",", "")) || 0)));
    const asked = {
      layout: own.layout, model, device: own.device, batch: count(own.batch), sequence: count(own.sequence),
      operations: own.operations,
    };
    number += 1;
    document.body.classList.add("busy");
    worker?.postMessage({ ask: { text: JSON.stringify(asked), number } });
    const words = new URLSearchParams(Object.entries(own).filter(([k, v]) => v !== DEFAULTS[k]));
    history.replaceState(null, "", words.size ? `#${words}` : location.pathname + location.search);
  }

  function changed(name, value) {
    own[name] = value;
    if (name !== "operations") own.operations = "";
    clearTimeout(timer);
    timer = setTimeout(ask, 30);
  }

  // ---- answers
  function heard(data) {
    if (data.ready) return filled(data.ready);
    if (data.number !== number) return undefined;
    if ("fits" in data) return near(data.fits ? [data.fits] : [], true);
    if ("verdict" in data) return verdict(data.verdict);
    document.body.classList.remove("busy");
    $("state").textContent = `${Math.round(data.took)} ms`;
    return shown(data.answer);
  }

  function wrong(text) {
    $("wrong").hidden = !text;
    $("wrong").textContent = text || "";
  }

  function near(layouts, more) {
    const box = $("near");
    if (!more) box.replaceChildren();
    if (more && !box.children.length) box.append("Fits: ");
    if (!more && layouts.length) box.append("Nearest: ");
    for (const layout of layouts) box.append(chip(layout));
    if (more && !layouts.length) box.append("nothing near it was found.");
    box.hidden = !box.childNodes.length;
  }

  function chip(layout) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = layout;
    button.addEventListener("click", () => { $("layout").value = layout; changed("layout", layout); });
    return button;
  }

  function verdict(faults) {
    if (faults === undefined) return;
    $("verdict").textContent = faults || "check: every rank can run its list, none waits for ever, nothing is left over.";
    $("verdict").className = faults ? "bad" : "good";
  }

  function shown(answer) {
    near(answer.nearest || [], false);
    wrong(answer.error);
    $("shown").classList.toggle("stale", Boolean(answer.error));
    if (answer.error) return;
    $("shown").hidden = false;
    verdict(answer.verdict);
    if (document.activeElement !== $("operations")) $("operations").value = answer.operations;
    $("picture").classList.toggle("stale", Boolean(answer.verdict));
    if (answer.verdict) return;
    $("summary").innerHTML = answer.summary;
    $("memory").innerHTML = answer.memory;
    $("step").innerHTML = answer.step;
    $("picture").srcdoc = answer.page + TALL;
  }

  function filled({ shapes, devices }) {
    for (const [id, names] of [["shape", shapes], ["device", devices]]) {
      $(id).replaceChildren(...names.map((name) => new Option(name, name)));
      $(id).value = own[id];
    }
  }

  // ---- fields
  function fromAddress() {
    Object.assign(own, DEFAULTS, Object.fromEntries(new URLSearchParams(location.hash.slice(1))));
    for (const name of FIELDS) $(name).value = own[name];
    $("pasted").open = Boolean(own.config);
    $("edit").open = Boolean(own.operations);
  }

  for (const name of FIELDS) $(name).addEventListener("input", (event) => changed(name, event.target.value));
  $("form").addEventListener("submit", (event) => event.preventDefault());
  $("undo").addEventListener("click", () => { $("operations").value = ""; changed("operations", ""); });
  $("share").addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(location.href);
      $("state").textContent = "The address is copied.";
    } catch {
      $("state").textContent = "The address of this page says all of it: copy it.";
    }
  });
  window.addEventListener("hashchange", () => { fromAddress(); ask(); });
  $("examples").append(...EXAMPLES.map(chip));
  fitFrame($("picture"));
  fromAddress();
  start().catch((error) => failed(String(error)));
})();
