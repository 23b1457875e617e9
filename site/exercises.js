// The page of exercises: tasks from Python, answers to it, and an address that holds both.
"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const own = { exercise: "", answer: "" };
  let all = [], worker = null, number = 0;

  // ---- answered exercises are remembered where the browser allows it
  function solved() {
    try {
      return new Set(JSON.parse(localStorage.getItem("phalanx-exercises") || "[]"));
    } catch {
      return new Set();
    }
  }

  function remember(name) {
    try {
      localStorage.setItem("phalanx-exercises", JSON.stringify([...solved().add(name)]));
    } catch { /* a private window */ }
  }

  // ---- the list and the task
  function list() {
    const done = solved();
    $("list").replaceChildren(...all.map(({ name }) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = done.has(name) ? `✓ ${name}` : name;
      button.setAttribute("aria-current", String(name === own.exercise));
      button.addEventListener("click", () => choose(name, ""));
      return button;
    }));
  }

  function choose(name, answer) {
    const asked = all.find((each) => each.name === name) || all[0];
    own.exercise = asked.name;
    own.answer = answer;
    $("task").textContent = asked.task;
    $("chapter").textContent = `phalanx lab ${asked.chapter}`;
    $("answer").value = answer || asked.start;
    $("answer").rows = Math.max(2, $("answer").value.split("\n").length + 1);
    $("verdict").textContent = "";
    $("picture").hidden = true;
    list();
    address();
    if (answer) check();
  }

  function address() {
    const words = new URLSearchParams(Object.entries(own).filter(([, v]) => v));
    history.replaceState(null, "", `#${words}`);
  }

  // ---- asking Python
  function check() {
    own.answer = $("answer").value;
    address();
    number += 1;
    const text = JSON.stringify({ exercise: own.exercise, answer: own.answer });
    worker.postMessage({ ask: { text, number } });
  }

  function heard(data) {
    if (data.ready) return filled(data.ready);
    if (data.number !== number || !data.answer) return undefined;
    const { right, words, page, error } = data.answer;
    $("verdict").textContent = error || words;
    $("verdict").className = right ? "good" : "bad";
    $("picture").hidden = !page;
    if (page) $("picture").srcdoc = page + TALL;
    if (right) remember(own.exercise);
    return list();
  }

  function filled({ exercises }) {
    all = exercises;
    $("state").textContent = "";
    $("exercise").hidden = false;
    fromAddress();
  }

  function failed(why) {
    $("state").textContent = `Python did not start: ${why}. The page needs a browser with WebAssembly and workers.`;
  }

  function fromAddress() {
    const words = new URLSearchParams(location.hash.slice(1));
    choose(words.get("exercise") || "", words.get("answer") || "");
  }

  $("exercise").addEventListener("submit", (event) => { event.preventDefault(); check(); });
  $("answer").addEventListener("input", () => { own.answer = $("answer").value; address(); });
  window.addEventListener("hashchange", fromAddress);
  fitFrame($("picture"));
  startPython(heard, failed).then((started) => { worker = started; }, (error) => failed(String(error)));
})();
