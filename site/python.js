// Starts Python in a worker. Files stand in scripts beside the page, as a page from a disk may fetch nothing.
"use strict";
const startPython = async (heard, failed) => {
  async function unpacked(text) {
    const raw = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  }

  const names = Object.keys(window.FILES);
  const files = Object.fromEntries(await Promise.all(names.map(async (n) => [n, await unpacked(window.FILES[n])])));
  const code = new Blob([files["worker.js"]], { type: "text/javascript" });
  const worker = new Worker(URL.createObjectURL(code));
  worker.onmessage = ({ data }) => (data.failed ? failed(data.failed) : heard(data));
  worker.onerror = (event) => failed(event.message);
  worker.postMessage({ files });
  return worker;
};

// A picture stands in a frame that can reach nothing; it says how tall it is.
const TALL = "<script>new ResizeObserver(() => parent.postMessage({ tall: document.documentElement.offsetHeight }, '*')).observe(document.body)</" + "script>";
const fitFrame = (frame) => window.addEventListener("message", ({ data, source }) => {
  if (source === frame.contentWindow && data.tall > 0) frame.style.height = `${Math.min(data.tall + 8, 20000)}px`;
});
