// What the pages do beyond links and forms: copy, ask before something is lost, show an upload's progress, draw the
// learning curve. Every page also works without this file, but for copying and the drawn curve.
"use strict";

(function () {
  const say = (words) => {
    const place = document.getElementById("spoken");
    place.textContent = "";
    window.setTimeout(() => { place.textContent = words; }, 50);
  };

  // --- copying ---

  const copy = async (button) => {
    const text = document.getElementById(button.dataset.copy).innerText;
    const before = button.dataset.before || (button.dataset.before = button.innerHTML);
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
      say("Copied");
    } catch {
      const range = document.createRange(); // no clipboard over plain HTTP: mark it, for Ctrl-C
      range.selectNodeContents(document.getElementById(button.dataset.copy));
      const marked = window.getSelection();
      marked.removeAllRanges();
      marked.addRange(range);
      button.textContent = "Marked: press Ctrl-C";
    }
    window.setTimeout(() => { button.innerHTML = before; }, 2000);
  };

  document.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    if (button.dataset.copy) copy(button);
    if (button.dataset.ask && !window.confirm(button.dataset.ask)) event.preventDefault();
    if (button.dataset.fill) {
      document.getElementById("text").value = button.dataset.text;
      const pair = document.getElementById("pair");
      if (pair) pair.value = button.dataset.pair || "";
      document.getElementById("text").form.requestSubmit();
    }
  });

  document.addEventListener("change", (event) => {
    const form = event.target.closest("form[data-submit-on-change]");
    if (form) form.requestSubmit();
  });

  // A form that is sent twice by a double click would make two jobs.
  document.addEventListener("submit", (event) => {
    const form = event.target;
    if (event.defaultPrevented || form.matches("[hx-post], [data-upload]") || form.method !== "post") return;
    if (form.dataset.sent) { event.preventDefault(); return; }
    form.dataset.sent = "yes";
    window.setTimeout(() => { delete form.dataset.sent; }, 5000);
  });
  window.addEventListener("pageshow", () => document.querySelectorAll("form[data-sent]").forEach((form) => { delete form.dataset.sent; }));

  // --- uploading ---

  const upload = (form) => {
    const file = form.querySelector("input[type=file]").files[0];
    if (!file) return;
    const sending = form.querySelector("[data-sending]");
    const words = form.querySelector("[data-sending-words]");
    const bar = form.querySelector("progress");
    const fail = (html) => {
      sending.hidden = true;
      form.querySelector("input[type=file]").value = ""; // else the same file, mended, could not be chosen again
      const found = html && new DOMParser().parseFromString(html, "text/html").querySelector("#upload-fault");
      const place = document.getElementById("upload-fault");
      place.replaceChildren();
      if (found) place.append(...document.importNode(found, true).childNodes);
      else {
        const notice = document.createElement("div");
        notice.className = "notice bad";
        notice.setAttribute("role", "alert");
        notice.textContent = "The file did not arrive. Is the service still running? Try again.";
        place.append(notice);
      }
      place.scrollIntoView({ block: "nearest" });
    };
    const request = new XMLHttpRequest();
    request.open("POST", form.action);
    request.setRequestHeader("X-Upload", "page");
    request.upload.addEventListener("progress", (event) => {
      if (!event.lengthComputable) return;
      bar.value = (100 * event.loaded) / event.total;
      words.textContent = event.loaded < event.total ? `Sending ${file.name}: ${Math.floor(bar.value)}%` : `Reading ${file.name} …`;
    });
    request.addEventListener("load", () => {
      const next = request.getResponseHeader("X-Next");
      if (next) window.location.assign(next);
      else fail(request.responseText);
    });
    request.addEventListener("error", () => fail(null));
    sending.hidden = false;
    words.textContent = `Sending ${file.name} …`;
    request.send(new FormData(form));
  };

  document.addEventListener("submit", (event) => {
    const form = event.target.closest("form[data-upload]");
    if (!form) return;
    event.preventDefault();
    upload(form);
  });
  document.querySelectorAll("form[data-upload] button").forEach((button) => { button.hidden = true; }); // choosing sends
  document.addEventListener("change", (event) => {
    const form = event.target.closest("form[data-upload]");
    if (form && event.target.type === "file" && event.target.files.length) form.requestSubmit();
  });
  for (const [name, isOver] of [["dragenter", true], ["dragover", true], ["dragleave", false], ["drop", false]]) {
    document.addEventListener(name, (event) => {
      const place = event.target.closest && event.target.closest("[data-drop]");
      if (place) place.classList.toggle("over", isOver);
    });
  }

  // --- the learning curve ---

  let chart = null;
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const drawCurve = () => {
    const box = document.querySelector("[data-chart]");
    const source = box && document.getElementById(box.dataset.chart);
    if (!source || typeof uPlot === "undefined") return;
    const points = JSON.parse(source.dataset.points);
    const empty = box.querySelector("[data-chart-empty]");
    if (empty) empty.hidden = points.rounds.length > 0;
    if (!points.rounds.length) return;
    const data = [points.rounds, points.scores];
    if (chart && chart.root.isConnected) { chart.setData(data); return; }
    const axis = { stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line"), width: 1 }, font: "12px system-ui, sans-serif" };
    const show = (value) => (value == null ? "–" : points.percent ? `${(100 * value).toFixed(1)}%` : value.toFixed(3));
    chart = new uPlot({
      width: box.clientWidth,
      height: box.clientHeight,
      scales: {
        x: { time: false, range: () => [0, Math.max(points.most || 0, 1, ...(chart ? chart.data[0] : points.rounds))] },
        y: { range: (plot, low, high) => { const room = Math.max((high - low) * 0.15, points.percent ? 0.005 : 1e-6); return points.percent ? [Math.max(0, low - room), Math.min(1, high + room)] : [low - room, high + room]; } },
      },
      series: [
        { label: "Round" },
        { label: "Score", stroke: colour("--accent"), width: 2.5, value: (plot, value) => show(value), points: { show: true, size: 7, fill: colour("--card") } },
      ],
      axes: [
        { ...axis, incrs: [1, 2, 5, 10, 20, 50, 100], values: (plot, values) => values.map((value) => (Number.isInteger(value) ? value : "")) },
        { ...axis, size: 58, values: (plot, values) => values.map(show) },
      ],
      cursor: { drag: { x: false, y: false } },
      legend: { show: false },
    }, data, box);
  };

  const redraw = () => {
    if (chart) { chart.destroy(); chart = null; }
    drawCurve();
  };

  document.addEventListener("DOMContentLoaded", drawCurve);
  document.addEventListener("htmx:afterSettle", drawCurve);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  let width = 0;
  window.addEventListener("resize", () => {
    const box = document.querySelector("[data-chart]");
    if (box && box.clientWidth !== width) { width = box.clientWidth; redraw(); }
  });

  // --- partial updates ---

  // What the service refuses is shown where the answer would have been; if it is gone, say so.
  document.addEventListener("htmx:sendError", () => say("The service did not answer. Is it still running?"));
  document.addEventListener("htmx:afterSettle", (event) => {
    const place = event.target.querySelector && event.target.querySelector("[data-focus]");
    if (place) place.focus();
  });
  document.addEventListener("htmx:oobAfterSwap", (event) => {
    const log = event.target.closest && event.target.closest("#log");
    if (log) log.scrollTop = log.scrollHeight;
  });
})();
