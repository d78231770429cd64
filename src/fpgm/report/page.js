"use strict";
(() => {
  const root = document.documentElement;
  const { layers = [], streams = [], phrases = [], specs } = JSON.parse(document.getElementById("data").textContent);
  const make = (tag, text, name) => {
    const node = document.createElement(tag);
    if (text !== undefined) node.textContent = text;
    if (name) node.className = name;
    return node;
  };
  const drawn = (tag, values) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    Object.entries(values).forEach(([key, value]) => node.setAttribute(key, value));
    return node;
  };
  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const phrase = (number) => (number === undefined ? "" : phrases[number]);

  // What was chosen outlives a reload; where the browser keeps nothing, it does not.
  const remember = (name, value) => { try { sessionStorage.setItem(storeKey + name, value); } catch { /* then not */ } };

  // Charts take their letters and lines from the page; their colours have a partner for the dark.
  const DARK = { "#0072b2": "#56b4e9", "#d55e00": "#ee8a45", "#009e73": "#3fc79a", "#cc79a7": "#e7a3cb", "#e69f00": "#f2c14e",
    "#56b4e9": "#9ad4f5", "#000000": "#e8ecf0", "#9a9a9a": "#a5b0bb", white: "#14181d" };
  const isDark = () => root.dataset.theme === "dark" && !window.matchMedia("print").matches;
  const themed = (spec) => !isDark() ? spec : JSON.parse(JSON.stringify(spec), (name, value) =>
    typeof value === "string" && Object.hasOwn(DARK, value) ? DARK[value]
      : name === "scheme" && value.name === "viridis" ? { name: "viridis", extent: [0.3, 1] } : value);
  const config = () => {
    const ink = colour("--ink"), line = colour("--line");
    const font = "system-ui, 'Segoe UI', Helvetica, Arial, sans-serif";
    return {
      background: null, font, view: { stroke: null }, padding: { left: 2, right: 14, top: 5, bottom: 2 }, // the last label sticks out
      axis: { labelColor: ink, titleColor: ink, domainColor: line, tickColor: line, grid: true,
        gridColor: line, gridOpacity: 0.5, labelFontSize: 11, labelSeparation: 4, labelFlush: false, titleFontSize: 12, titleFontWeight: "normal" },
      axisBand: { grid: false }, axisPoint: { grid: false },
      legend: { labelColor: ink, titleColor: ink, orient: "bottom", title: null, labelFontSize: 11, columnPadding: 6, columns: 3, labelLimit: 150, symbolOpacity: 1 },
      title: { color: ink, anchor: "start", fontWeight: "normal" }, text: { color: ink },
    };
  };
  const draw = (place, spec) =>
    vegaEmbed(place, themed(spec), { renderer: "svg", actions: false, config: config() }).then(() => {
      if (place.scrollHeight > place.clientHeight + 1) place.tabIndex = 0; // else the keyboard could not scroll it
    }).catch((error) => {
      place.textContent = "This chart cannot be drawn: " + error.message;
    });
  const drawAll = () => {
    document.querySelectorAll("[data-chart]").forEach((place) => draw(place, specs[Number(place.dataset.chart)]));
    if (chosen !== null) choose(chosen);
  };
  const setTheme = (name) => {
    root.dataset.theme = name;
    document.getElementById("theme").setAttribute("aria-pressed", String(name === "dark"));
    drawAll();
  };

  // The network: a button a layer, with the streams beside it.
  const gone = (layer) => layer.filters === undefined ? 0 : layer.filters - layer.kept;
  const diagram = document.getElementById("diagram");
  if (diagram) {
    const beside = layers.map(() => []);
    streams.forEach((stream, which) => {
      const writes = new Set(stream.writes), reads = new Set(stream.reads);
      for (let row = stream.first; row <= stream.last; row++)
        beside[row].push({ stream, colour: which % 6, top: row > stream.first, bottom: row < stream.last, writes: writes.has(row), reads: reads.has(row) });
    });
    const columns = 1 + streams.reduce((most, stream) => Math.max(most, stream.column), -1);
    const step = Math.max(6, Math.min(14, 0.25 * diagram.clientWidth / columns)), radius = Math.min(5, step / 2 - 0.5);
    const widest = layers.reduce((most, layer) => Math.max(most, layer.filters || 0), 1);
    const length = (layer) => 100 * Math.sqrt((layer.filters || 0) / widest); // or 1000 classes would leave 64 filters no room
    diagram.append(...layers.map((layer, number) => {
      const button = make("button", undefined, "layer");
      button.type = "button";
      button.dataset.layer = number;
      button.title = layer.name;
      button.setAttribute("aria-pressed", "false");
      const lanes = drawn("svg", { width: columns ? step * columns + 4 : 0, height: 26, "aria-hidden": "true", focusable: "false" });
      const told = [layer.name + ": " + (layer.filters === undefined ? "all filters stay" : layer.kept + " of " + layer.filters + " filters stay")];
      beside[number].forEach((lane) => {
        const x = step * (lane.stream.column + 0.5) + 2, name = "c" + lane.colour;
        if (lane.top) lanes.append(drawn("line", { class: "lane " + name, x1: x, y1: 0, x2: x, y2: 13 }));
        if (lane.bottom) lanes.append(drawn("line", { class: "lane " + name, x1: x, y1: 13, x2: x, y2: 26 }));
        if (lane.writes) lanes.append(drawn("circle", { class: "dot full " + name, cx: x, cy: 13, r: radius }));
        else if (lane.reads) lanes.append(drawn("circle", { class: "dot " + name, cx: x, cy: 13, r: radius - 1 }));
        if (lane.writes || lane.reads) told.push((lane.writes ? "writes" : "reads") + " stream " + lane.stream.name);
      });
      button.setAttribute("aria-label", told.join("; "));
      const bar = make("span", undefined, "bar"), kept = make("span", undefined, "kept"), lost = make("span", undefined, "gone");
      bar.setAttribute("aria-hidden", "true");
      if (layer.filters) {
        kept.style.width = length(layer) * layer.kept / layer.filters + "%";
        lost.style.width = length(layer) * gone(layer) / layer.filters + "%";
      }
      bar.append(kept, ...(gone(layer) ? [lost] : []));
      const name = make("span", undefined, "name"), count = make("span", layer.filters === undefined ? "all" : String(layer.kept), "count");
      name.append(make("bdi", layer.name));
      if (layer.filters !== undefined) count.append(make("small", "/" + layer.filters));
      button.append(lanes, name, bar, count);
      return button;
    }));
    diagram.addEventListener("click", (event) => {
      const button = event.target.closest(".layer");
      if (!button) return;
      pick(Number(button.dataset.layer));
      showDetails();
    });
    diagram.addEventListener("keydown", (event) => {
      const own = document.activeElement.closest(".layer");
      const next = own && { ArrowDown: own.nextElementSibling, ArrowUp: own.previousElementSibling,
        Home: diagram.firstElementChild, End: diagram.lastElementChild }[event.key];
      if (!next) return;
      event.preventDefault();
      next.focus();
    });
  }

  // One layer.
  let chosen = null;
  const percent = (share) => share === 0 ? "0%" : share < 0.0005 ? "<0.1%" : (100 * share).toFixed(1) + "%";
  const filters = (count) => count + (count === 1 ? " filter" : " filters");
  const sentence = (layer) => {
    if (layer.filters === undefined) return "All of its filters stay.";
    if (!gone(layer)) return filters(layer.filters) + ", all of which stay.";
    return filters(layer.filters) + ", of which " + gone(layer) + " (" + percent(gone(layer) / layer.filters) + ") go.";
  };
  const points = (layer) => {
    const removed = new Set(layer.removed);
    return layer.norms.map((norm, n) => ({
      filter: n, norm, kind: removed.has(n) ? "removed" : "kept",
      x: layer.places && layer.places[n][0], y: layer.places && layer.places[n][1], distance: layer.to_median && layer.to_median[n],
    })).filter((point) => point.norm !== null);
  };
  const kinds = (middle) => ({
    domain: ["kept", "removed"].concat(middle ? ["median"] : []),
    range: [colour("--kept"), colour("--gone")].concat(middle ? [colour("--ink")] : []),
  });
  const around = (layer) => { // a little more than there is, so that the curve ends where nothing is
    const norms = layer.norms.filter((norm) => norm !== null);
    const low = norms.reduce((a, b) => Math.min(a, b), Infinity), high = norms.reduce((a, b) => Math.max(a, b), -Infinity);
    const margin = 0.15 * (high - low) || 0.1;
    return norms.length ? [Math.max(0, low - margin), high + margin] : [0, 1];
  };
  const normSpec = (layer) => ({
    width: "container", height: 170, data: { values: points(layer) },
    layer: [
      { transform: [{ density: "norm", as: ["norm", "density"], extent: around(layer) }], mark: { type: "area", opacity: 0.25, color: colour("--kept"), line: { color: colour("--kept") } },
        encoding: { x: { field: "norm", type: "quantitative", title: "norm", scale: { domain: around(layer), nice: false } }, y: { field: "density", type: "quantitative", title: "density" } } },
      { mark: { type: "tick", thickness: 1.5, size: 14, yOffset: 0 },
        encoding: { x: { field: "norm", type: "quantitative" }, y: { value: 163 }, color: { field: "kind", type: "nominal", scale: kinds(false) },
          tooltip: [{ field: "filter" }, { field: "norm", format: ".3g" }, { field: "kind" }] } },
    ],
  });
  const mapSpec = (layer) => ({
    width: "container", height: 170, data: { values: points(layer).concat([{ x: 0, y: 0, kind: "median" }]) },
    mark: { type: "point", filled: true, size: 45, opacity: 0.8 },
    encoding: {
      x: { field: "x", type: "quantitative", title: "first direction" }, y: { field: "y", type: "quantitative", title: "second direction" },
      color: { field: "kind", type: "nominal", scale: kinds(true) },
      shape: { field: "kind", type: "nominal", scale: { domain: kinds(true).domain, range: ["circle", "cross", "diamond"] } },
      tooltip: [{ field: "filter" }, { field: "norm", format: ".3g" }, { field: "distance", title: "distance to the median", format: ".3g" }, { field: "kind" }],
    },
  });
  const strip = (layer) => {
    const removed = new Set(layer.removed), order = layer.to_median || layer.norms;
    const cells = make("div", undefined, "strip");
    cells.setAttribute("role", "img");
    cells.setAttribute("aria-label", removed.size ? "Removed: " + layer.removed.join(", ") : "No filter is removed");
    layer.norms.map((norm, n) => n).sort((a, b) => order[a] - order[b]).forEach((n) => {
      const cell = make("span", undefined, removed.has(n) ? "gone" : "");
      cell.title = "filter " + n + ", norm " + layer.norms[n] + (layer.to_median ? ", " + layer.to_median[n] + " from the median" : "");
      cells.append(cell);
    });
    return cells;
  };
  const choose = (number) => {
    chosen = number;
    const layer = layers[number];
    document.querySelectorAll(".layer[aria-pressed='true']").forEach((button) => button.setAttribute("aria-pressed", "false"));
    diagram.children[number].setAttribute("aria-pressed", "true");
    const place = document.getElementById("details");
    place.replaceChildren(make("h3", layer.name), make("p", sentence(layer)));
    const say = (text, name) => place.append(make("p", text, name));
    if (layer.groups) say((layer.groups.length > 1 ? "Groups: " : "Group: ") + layer.groups.map(phrase).join("; ") + ".");
    if (layer.why !== undefined) say((gone(layer) ? "Part of it stays: " : "Left whole: ") + phrase(layer.why) + ".");
    if (layer.verdict !== undefined) say("Norms: " + phrase(layer.verdict) + ".");
    if (layer.error && layer.error[0] !== 0) say("Error of its output, solved for: " + layer.error.map((v) => v === null ? "?" : v.toPrecision(2)).join(" → ") + ".");
    if (!layer.norms) return;
    say("Filters from " + (layer.to_median ? "the nearest to the geometric median to the farthest" : "the smallest norm to the largest") + "; framed ones go:", "caption");
    const left = make("div", undefined, "chart"), right = make("div", undefined, "chart"), pair = make("div", undefined, "pair");
    left.id = "norms"; right.id = "map";
    pair.append(left, ...(layer.places ? [right] : []));
    place.append(strip(layer), pair);
    say(layer.places ? "Their norms; and the plane in which they spread most around their geometric median." : "Their norms.", "caption");
    draw(left, normSpec(layer));
    if (layer.places) draw(right, mapSpec(layer));
  };
  const pick = (number) => {
    choose(number);
    remember("layer", layers[number].name);
    document.getElementById("said").textContent = layers[number].name + ": " + sentence(layers[number]);
  };
  const showDetails = () => { // on a phone they are below the network, perhaps out of sight
    const place = document.getElementById("details"), top = place.getBoundingClientRect().top;
    const below = top >= diagram.getBoundingClientRect().bottom;
    if (below && (top < 0 || top > 0.6 * window.innerHeight)) place.scrollIntoView();
    return below;
  };

  // The table: columns of which anything is known.
  const table = document.getElementById("table");
  if (table) {
    const all = [
      ["layer", (layer) => layer.name, String],
      ["filters", (layer) => layer.filters, String],
      ["kept", (layer) => layer.kept, String],
      ["removed", (layer) => layer.filters ? gone(layer) / layer.filters : undefined, percent],
      ["MACs", (layer) => layer.macs_share, percent],
      ["deviation", (layer) => layer.deviation, (value) => value.toFixed(2)],
      ["least", (layer) => layer.least, (value) => value.toFixed(3)],
      ["rank", (layer) => layer.effective_rank, (value) => value.toFixed(1)],
      ["group", (layer) => layer.groups && layer.groups.map(phrase).join("; "), String],
      ["why it stays", (layer) => phrase(layer.why) || undefined, String],
    ];
    const columns = all.filter(([, value]) => layers.some((layer) => value(layer) !== undefined));
    const worded = (name) => name === "layer" || name === "group" || name.startsWith("why");
    const head = table.tHead.rows[0], body = table.tBodies[0];
    const rows = layers.map((layer, number) => {
      const row = make("tr");
      columns.forEach(([name, value, show]) => {
        const own = value(layer), text = own === undefined ? "" : show(own);
        if (name === "layer") {
          const cell = make("th"), link = make("button", undefined, "link");
          cell.scope = "row"; link.type = "button"; link.dataset.layer = number; link.title = layer.name;
          link.append(make("bdi", text));
          cell.append(link);
          row.append(cell);
        } else if (name === "group") {
          const cell = make("td", undefined, "text groups"), groups = (layer.groups || []).map(phrase);
          const shown = groups.length > 3 ? groups.slice(0, 2) : groups;
          cell.append(...shown.map((group) => make("div", group)));
          if (shown.length < groups.length) cell.append(make("div", "and " + (groups.length - shown.length) + " more"));
          cell.title = text;
          row.append(cell);
        } else row.append(make("td", text, worded(name) ? "text" : ""));
      });
      const words = columns.filter(([name]) => worded(name)).map(([, value]) => value(layer) || "");
      return { row, layer, text: words.join(" ").toLowerCase() };
    });
    body.append(...rows.map((own) => own.row));
    columns.forEach(([name, value]) => {
      const cell = make("th", undefined, worded(name) ? "text" : ""), button = make("button", name);
      cell.scope = "col"; button.type = "button";
      cell.setAttribute("aria-sort", "none");
      cell.append(button);
      head.append(cell);
      button.addEventListener("click", () => {
        const up = cell.getAttribute("aria-sort") !== "ascending";
        Array.from(head.cells).forEach((other) => other.setAttribute("aria-sort", "none"));
        cell.setAttribute("aria-sort", up ? "ascending" : "descending");
        const sorted = rows.slice().sort((a, b) => {
          const x = value(a.layer), y = value(b.layer);
          if (x === undefined || y === undefined) return (x === undefined) - (y === undefined); // what is not known comes last
          const order = typeof x === "number" ? x - y : x.localeCompare(y, undefined, { numeric: true });
          return up ? order : -order;
        });
        body.append(...sorted.map((own) => own.row));
      });
    });
    body.addEventListener("click", (event) => {
      const link = event.target.closest(".link");
      if (!link) return;
      pick(Number(link.dataset.layer));
      diagram.children[Number(link.dataset.layer)].scrollIntoView({ block: "nearest" });
      if (!showDetails()) document.getElementById("h-network").scrollIntoView();
      document.getElementById("details").focus({ preventScroll: true });
    });
    const search = document.getElementById("search");
    const find = () => {
      const wanted = search.value.trim().toLowerCase();
      rows.forEach((own) => { own.row.hidden = wanted !== "" && !own.text.includes(wanted); });
      document.getElementById("found").textContent = wanted ? rows.filter((own) => !own.row.hidden).length + " of " + rows.length : "";
      remember("search", search.value);
    };
    search.value = remembered("search") || "";
    search.addEventListener("input", find);
    if (search.value) find();
  }

  const copy = document.getElementById("copy");
  if (copy) copy.addEventListener("click", async () => {
    const command = document.getElementById("command");
    try {
      await navigator.clipboard.writeText(command.textContent);
      copy.textContent = "Copied";
    } catch { // not every browser lets a page: then it is selected, to be copied by hand
      getSelection().selectAllChildren(command);
      copy.textContent = "Selected";
    }
    setTimeout(() => { copy.textContent = "Copy"; }, 2000);
  });

  if (layers.length) {
    const before = layers.findIndex((layer) => layer.name === remembered("layer"));
    chosen = before >= 0 ? before : Math.max(0, layers.findIndex((layer) => gone(layer) > 0));
  }
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  document.getElementById("theme").addEventListener("click", () => {
    const name = root.dataset.theme === "dark" ? "light" : "dark";
    remember("theme", name);
    setTheme(name);
  });
  setTheme(root.dataset.theme);
  dark.addEventListener("change", () => setTheme(dark.matches ? "dark" : "light"));
  window.matchMedia("print").addEventListener("change", () => { if (root.dataset.theme === "dark") drawAll(); });

  // A page that is served asks whether its folder is still the one it was made from.
  if (document.body.dataset.live) {
    setInterval(async () => {
      try {
        const answer = await fetch("version");
        if (answer.ok && await answer.text() !== document.body.dataset.live) location.reload();
      } catch { /* the server is gone; the page stays */ }
    }, 2000);
  }
})();
