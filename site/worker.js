// Runs Python in a thread of its own. Messages in: the files, then what is asked. A newer question
// overtakes the search for layouts that fit, which goes on one layout at a time.
"use strict";
let play = null, waiting = null, searching = 0;

self.onmessage = ({ data }) => {
  if (data.files) {
    start(data.files).catch((error) => self.postMessage({ failed: String(error) }));
  } else {
    waiting = data.ask;
    if (play) serve();
  }
};

async function start(files) {
  const here = "https://in.this.page/";
  const fetched = self.fetch;
  const types = { wasm: "application/wasm", json: "application/json" };
  self.fetch = async (url, options) => {
    const name = String(url).startsWith(here) ? String(url).slice(here.length) : "";
    if (!(name in files)) return fetched(url, options);
    return new Response(files[name], { headers: { "Content-Type": types[name.split(".").pop()] || "application/octet-stream" } });
  };
  // Pyodide refuses workers that can load plain scripts, as it could not load its modules there.
  const load = self.importScripts.bind(self);
  self.importScripts = () => { throw new TypeError("all scripts are here"); };
  // A page from a disk may not load modules: they are made plain scripts.
  const script = (name, change) => {
    const text = change(new TextDecoder().decode(files[name]));
    load(URL.createObjectURL(new Blob([text], { type: "text/javascript" })));
  };
  script("pyodide.js", (text) => text);
  script("pyodide.asm.mjs", (text) =>
    text.replaceAll("import.meta.url", "''").replace(/export default (\w+);/, "self.createPyodideModule = $1;"));
  const python = await loadPyodide({ indexURL: here, createPyodideModule: self.createPyodideModule, lockFileContents: new TextDecoder().decode(files["pyodide-lock.json"]) });
  python.unpackArchive(files["phalanx.zip"].buffer, "zip");
  python.FS.writeFile("costs.json", files["costs.json"]);
  play = python.pyimport("play").Playground("costs.json");
  self.postMessage({ ready: JSON.parse(play.choices()) });
  serve();
}

function serve() {
  if (waiting === null) return;
  const asked = waiting;
  waiting = null;
  const turn = ++searching, began = performance.now();
  const answer = JSON.parse(play.answer(asked.text));
  self.postMessage({ answer, number: asked.number, took: performance.now() - began });
  later(turn, asked.number);
}

function later(turn, number) {
  if (turn !== searching || waiting !== null) return;
  const found = play.more();
  if (found === "") return;
  if (found !== "{}") self.postMessage({ ...JSON.parse(found), number });
  setTimeout(later, 0, turn, number);
}
