"use strict";
(() => {
  const root = document.documentElement;
  const { layers = [], streams = [], strings = [], specs } = JSON.parse(document.getElementById("data").textContent);
  const makeElement = (tag, text, name) => {
    const node = document.createElement(tag);
    if (text !== undefined) node.textContent = text;
    if (name) node.className = name;
    return node;
  };
  const makeSvg = (tag, values) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    Object.entries(values).forEach(([key, value]) => node.setAttribute(key, value));
    return node;
  };
  const color = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const lookup = (index) => (index === undefined ? "" : strings[index]);

  // Selections survive a reload, unless the browser blocks session storage.
  const storeState = (name, value) => { try { sessionStorage.setItem(storeKey + name, value); } catch { /* blocked */ } };

  // Charts use the page's fonts and lines; each color has a counterpart for the dark theme.
  const DARK = { "#0072b2": "#56b4e9", "#d55e00": "#ee8a45", "#009e73": "#3fc79a", "#cc79a7": "#e7a3cb", "#e69f00": "#f2c14e",
    "#56b4e9": "#9ad4f5", "#000000": "#e8ecf0", "#9a9a9a": "#a5b0bb", white: "#14181d" };
  const isDark = () => root.dataset.theme === "dark" && !window.matchMedia("print").matches;
  const applyTheme = (spec) => !isDark() ? spec : JSON.parse(JSON.stringify(spec), (name, value) =>
    typeof value === "string" && Object.hasOwn(DARK, value) ? DARK[value]
      : name === "scheme" && value.name === "viridis" ? { name: "viridis", extent: [0.3, 1] } : value);
  const config = () => {
    const ink = color("--text"), line = color("--line");
    const font = "system-ui, 'Segoe UI', Helvetica, Arial, sans-serif";
    return {
      background: null, font, view: { stroke: null }, padding: { left: 2, right: 14, top: 5, bottom: 2 }, // room for the last label
      axis: { labelColor: ink, titleColor: ink, domainColor: line, tickColor: line, grid: true,
        gridColor: line, gridOpacity: 0.5, labelFontSize: 11, labelSeparation: 4, labelFlush: false, titleFontSize: 12, titleFontWeight: "normal" },
      axisBand: { grid: false }, axisPoint: { grid: false },
      legend: { labelColor: ink, titleColor: ink, orient: "bottom", title: null, labelFontSize: 11, columnPadding: 6, columns: 3, labelLimit: 150, symbolOpacity: 1 },
      title: { color: ink, anchor: "start", fontWeight: "normal" }, text: { color: ink },
    };
  };
  const draw = (place, spec) =>
    vegaEmbed(place, applyTheme(spec), { renderer: "svg", actions: false, config: config() }).then(() => {
      if (place.scrollHeight > place.clientHeight + 1) place.tabIndex = 0; // makes it scrollable by keyboard
    }).catch((error) => {
      place.textContent = "This chart cannot be drawn: " + error.message;
    });
  const drawAll = () => {
    document.querySelectorAll("[data-chart]").forEach((place) => draw(place, specs[Number(place.dataset.chart)]));
    if (selected !== null) showLayer(selected);
  };
  const setTheme = (name) => {
    root.dataset.theme = name;
    document.getElementById("theme").setAttribute("aria-pressed", String(name === "dark"));
    drawAll();
  };

  // The network diagram: one button per layer, with the streams beside it.
  const removedCount = (layer) => layer.filters === undefined ? 0 : layer.filters - layer.kept;
  const diagram = document.getElementById("diagram");
  if (diagram) {
    const lanesByRow = layers.map(() => []);
    streams.forEach((stream, which) => {
      const producers = new Set(stream.producers), consumers = new Set(stream.consumers);
      for (let row = stream.first; row <= stream.last; row++)
        lanesByRow[row].push({ stream, color: which % 6, top: row > stream.first, bottom: row < stream.last, produces: producers.has(row), consumes: consumers.has(row) });
    });
    const columns = 1 + streams.reduce((most, stream) => Math.max(most, stream.column), -1);
    const step = Math.max(6, Math.min(14, 0.25 * diagram.clientWidth / columns)), radius = Math.min(5, step / 2 - 0.5);
    const widest = layers.reduce((most, layer) => Math.max(most, layer.filters || 0), 1);
    const length = (layer) => 100 * Math.sqrt((layer.filters || 0) / widest); // else a layer of 1000 classes would dwarf one of 64 filters
    diagram.append(...layers.map((layer, number) => {
      const button = makeElement("button", undefined, "layer");
      button.type = "button";
      button.dataset.layer = number;
      button.title = layer.name;
      button.setAttribute("aria-pressed", "false");
      const lanes = makeSvg("svg", { width: columns ? step * columns + 4 : 0, height: 26, "aria-hidden": "true", focusable: "false" });
      const labelParts = [layer.name + ": " + (layer.filters === undefined ? "all filters kept" : layer.kept + " of " + layer.filters + " filters kept") + (layer.frozen ? " (frozen)" : "")];
      lanesByRow[number].forEach((lane) => {
        const x = step * (lane.stream.column + 0.5) + 2, name = "c" + lane.color;
        if (lane.top) lanes.append(makeSvg("line", { class: "lane " + name, x1: x, y1: 0, x2: x, y2: 13 }));
        if (lane.bottom) lanes.append(makeSvg("line", { class: "lane " + name, x1: x, y1: 13, x2: x, y2: 26 }));
        if (lane.produces) lanes.append(makeSvg("circle", { class: "dot full " + name, cx: x, cy: 13, r: radius }));
        else if (lane.consumes) lanes.append(makeSvg("circle", { class: "dot " + name, cx: x, cy: 13, r: radius - 1 }));
        if (lane.produces || lane.consumes) labelParts.push((lane.produces ? "produces" : "consumes") + " stream " + lane.stream.name);
      });
      button.setAttribute("aria-label", labelParts.join("; "));
      const bar = makeElement("span", undefined, "bar"), kept = makeElement("span", undefined, layer.frozen ? "frozen" : "kept"), lost = makeElement("span", undefined, "removed");
      bar.setAttribute("aria-hidden", "true");
      if (layer.filters) {
        kept.style.width = length(layer) * layer.kept / layer.filters + "%";
        lost.style.width = length(layer) * removedCount(layer) / layer.filters + "%";
      } else if (layer.frozen) kept.style.width = "14px"; // its number of filters is unknown
      bar.append(kept, ...(removedCount(layer) ? [lost] : []));
      const name = makeElement("span", undefined, "name"), count = makeElement("span", layer.filters === undefined ? "all" : String(layer.kept), "count");
      name.append(makeElement("bdi", layer.name));
      if (layer.filters !== undefined) count.append(makeElement("small", "/" + layer.filters));
      button.append(lanes, name, bar, count);
      return button;
    }));
    diagram.addEventListener("click", (event) => {
      const button = event.target.closest(".layer");
      if (!button) return;
      selectLayer(Number(button.dataset.layer));
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

  // Details of the selected layer.
  let selected = null;
  const percent = (fraction) => fraction === 0 ? "0%" : fraction < 0.0005 ? "<0.1%" : (100 * fraction).toFixed(1) + "%";
  const filters = (count) => count + (count === 1 ? " filter" : " filters");
  const sentence = (layer) => {
    if (layer.filters === undefined) return "All filters are kept.";
    if (!removedCount(layer)) return filters(layer.filters) + ", all kept.";
    return filters(layer.filters) + ", " + removedCount(layer) + " removed (" + percent(removedCount(layer) / layer.filters) + ").";
  };
  const points = (layer) => {
    const removed = new Set(layer.removed);
    return layer.norms.map((norm, n) => ({
      filter: n, norm, kind: removed.has(n) ? "removed" : "kept",
      x: layer.places && layer.places[n][0], y: layer.places && layer.places[n][1], distance: layer.to_median && layer.to_median[n],
    })).filter((point) => point.norm !== null);
  };
  const kinds = (withMedian) => ({
    domain: ["kept", "removed"].concat(withMedian ? ["median"] : []),
    range: [color("--kept"), color("--removed")].concat(withMedian ? [color("--text")] : []),
  });
  const normRange = (layer) => { // with a margin, so that the density curve can fall to zero
    const norms = layer.norms.filter((norm) => norm !== null);
    const low = norms.reduce((a, b) => Math.min(a, b), Infinity), high = norms.reduce((a, b) => Math.max(a, b), -Infinity);
    const margin = 0.15 * (high - low) || 0.1;
    return norms.length ? [Math.max(0, low - margin), high + margin] : [0, 1];
  };
  const MIN_DENSITY = 32; // a density curve of fewer filters would show its bandwidth more than their norms
  const normSpec = (layer) => {
    const x = { field: "norm", type: "quantitative", title: "norm", scale: { domain: normRange(layer), nice: false } };
    const ticks = { mark: { type: "tick", thickness: 1.5, size: 14 },
      encoding: { x, color: { field: "kind", type: "nominal", scale: kinds(false) }, tooltip: [{ field: "filter" }, { field: "norm", format: ".3g" }, { field: "kind" }] } };
    const curve = { transform: [{ density: "norm", as: ["norm", "density"], extent: normRange(layer) }], mark: { type: "area", opacity: 0.25, color: color("--kept"), line: { color: color("--kept") } },
      encoding: { x, y: { field: "density", type: "quantitative", title: "density" } } };
    const spec = { width: "container", data: { values: points(layer) } };
    if (spec.data.values.length < MIN_DENSITY) return { ...spec, height: 40, ...ticks };
    return { ...spec, height: 170, layer: [curve, { ...ticks, encoding: { ...ticks.encoding, y: { value: 163 } } }] };
  };
  const mapSpec = (layer) => ({
    width: "container", height: 170, data: { values: points(layer).concat([{ x: 0, y: 0, kind: "median" }]) },
    mark: { type: "point", filled: true, size: 45, opacity: 0.8 },
    encoding: {
      x: { field: "x", type: "quantitative", title: "first direction" }, y: { field: "y", type: "quantitative", title: "second direction" },
      color: { field: "kind", type: "nominal", scale: kinds(true), legend: { columns: 2 } },
      shape: { field: "kind", type: "nominal", scale: { domain: kinds(true).domain, range: ["circle", "cross", "diamond"] } },
      tooltip: [{ field: "filter" }, { field: "norm", format: ".3g" }, { field: "distance", title: "distance to the median", format: ".3g" }, { field: "kind" }],
    },
  });
  const strip = (layer) => {
    const removed = new Set(layer.removed), order = layer.to_median || layer.norms;
    const cells = makeElement("div", undefined, "strip");
    cells.setAttribute("role", "img");
    cells.setAttribute("aria-label", removed.size ? "Removed: " + layer.removed.join(", ") : "No filter is removed");
    layer.norms.map((norm, n) => n).sort((a, b) => order[a] - order[b]).forEach((n) => {
      const cell = makeElement("span", undefined, removed.has(n) ? "removed" : "");
      cell.title = "filter " + n + ", norm " + layer.norms[n] + (layer.to_median ? ", " + layer.to_median[n] + " to the median" : "");
      cells.append(cell);
    });
    return cells;
  };
  const removedFarAway = (far) => {
    const shown = far.slice(0, 8), rest = far.length - shown.length;
    return (far.length > 1 ? "Filters " : "Filter ") + (rest ? shown.join(", ") + " and " + rest + " more"
      : shown.length > 1 ? shown.slice(0, -1).join(", ") + " and " + shown.at(-1) : shown[0]) + (far.length > 1 ? " are" : " is");
  };
  const showLayer = (number) => {
    selected = number;
    const layer = layers[number];
    document.querySelectorAll(".layer[aria-pressed='true']").forEach((button) => button.setAttribute("aria-pressed", "false"));
    diagram.children[number].setAttribute("aria-pressed", "true");
    const place = document.getElementById("details");
    place.replaceChildren(makeElement("h3", layer.name), makeElement("p", sentence(layer)));
    const addParagraph = (text, name) => place.append(makeElement("p", text, name));
    if (layer.groups) addParagraph((layer.groups.length > 1 ? "Groups: " : "Group: ") + layer.groups.map(lookup).join("; ") + ".");
    if (layer.reason !== undefined) addParagraph((removedCount(layer) ? "Partly frozen: " : "Frozen: ") + lookup(layer.reason) + ".");
    if (layer.verdict !== undefined) addParagraph("Norms: " + lookup(layer.verdict) + ".");
    if (layer.error && layer.error[0] !== 0) addParagraph("Output error before → after least squares: " + layer.error.map((v) => v === null ? "?" : v.toPrecision(2)).join(" → ") + ".");
    if (!layer.norms) return;
    addParagraph("Filters, sorted by " + (layer.to_median ? "distance to the geometric median, the nearest first" : "norm") + "; framed ones are removed:", "caption");
    const left = makeElement("div", undefined, "chart"), right = makeElement("div", undefined, "chart"), pair = makeElement("div", undefined, "pair");
    left.id = "norms"; right.id = "map";
    pair.append(left, ...(layer.places ? [right] : []));
    place.append(strip(layer));
    if (layer.far) addParagraph(removedFarAway(layer.far) + " removed although nearer ones are kept: " + lookup(layer.chosen_by) + ".");
    place.append(pair);
    addParagraph(layer.places ? "Left: filter norms. Right: filters in the two directions of largest variance, around their geometric median." : "Filter norms.", "caption");
    draw(left, normSpec(layer));
    if (layer.places) draw(right, mapSpec(layer));
  };
  const selectLayer = (number) => {
    showLayer(number);
    storeState("layer", layers[number].name);
    document.getElementById("announcement").textContent = layers[number].name + ": " + sentence(layers[number]);
  };
  const showDetails = () => { // on a narrow screen they are below the diagram and may be out of view
    const place = document.getElementById("details"), top = place.getBoundingClientRect().top;
    const below = top >= diagram.getBoundingClientRect().bottom;
    if (below && (top < 0 || top > 0.6 * window.innerHeight)) place.scrollIntoView();
    return below;
  };

  // The layer table: columns with at least one value.
  const table = document.getElementById("table");
  if (table) {
    const all = [
      ["Layer", (layer) => layer.name, String],
      ["Filters", (layer) => layer.filters, String],
      ["Kept", (layer) => layer.kept, String],
      ["Removed", (layer) => layer.filters ? removedCount(layer) / layer.filters : undefined, percent],
      ["Share of MACs", (layer) => layer.macs_share, percent],
      ["Spread of norms", (layer) => layer.deviation, (value) => value.toFixed(2)],
      ["Smallest norm", (layer) => layer.least, (value) => value.toFixed(2)],
      ["Effective rank", (layer) => layer.effective_rank, (value) => value.toFixed(1)],
      ["Group", (layer) => layer.groups && layer.groups.map(lookup).join("; "), String],
      ["Why frozen", (layer) => lookup(layer.reason) || undefined, String],
    ];
    const columns = all.filter(([, value]) => layers.some((layer) => value(layer) !== undefined));
    const isText = (name) => name === "Layer" || name === "Group" || name === "Why frozen";
    const head = table.tHead.rows[0], body = table.tBodies[0];
    const rows = layers.map((layer, number) => {
      const row = makeElement("tr");
      columns.forEach(([name, value, show]) => {
        const own = value(layer), text = own === undefined ? "" : show(own);
        if (name === "Layer") {
          const cell = makeElement("th"), link = makeElement("button", undefined, "link");
          cell.scope = "row"; link.type = "button"; link.dataset.layer = number; link.title = layer.name;
          text.split(".").forEach((part, n) => link.append(...(n ? [".", makeElement("wbr")] : []), part)); // long names break at dots
          cell.append(link);
          row.append(cell);
        } else if (name === "Group") {
          const cell = makeElement("td", undefined, "text groups"), groups = (layer.groups || []).map(lookup);
          const shown = groups.length > 3 ? groups.slice(0, 2) : groups;
          cell.append(...shown.map((group) => makeElement("div", group)));
          if (shown.length < groups.length) cell.append(makeElement("div", "and " + (groups.length - shown.length) + " more"));
          cell.title = text;
          row.append(cell);
        } else row.append(makeElement("td", text, isText(name) ? "text" : ""));
        row.lastChild.dataset.label = name; // shown on phones, where the columns are stacked
      });
      const words = columns.filter(([name]) => isText(name)).map(([, value]) => value(layer) || "");
      return { row, layer, text: words.join(" ").toLowerCase() };
    });
    body.append(...rows.map((own) => own.row));
    columns.forEach(([name, value]) => {
      const cell = makeElement("th", undefined, isText(name) ? "text" : ""), button = makeElement("button", name);
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
          if (x === undefined || y === undefined) return (x === undefined) - (y === undefined); // unknown values come last
          const order = typeof x === "number" ? x - y : x.localeCompare(y, undefined, { numeric: true });
          return up ? order : -order;
        });
        body.append(...sorted.map((own) => own.row));
      });
    });
    body.addEventListener("click", (event) => {
      const link = event.target.closest(".link");
      if (!link) return;
      selectLayer(Number(link.dataset.layer));
      diagram.children[Number(link.dataset.layer)].scrollIntoView({ block: "nearest" });
      if (!showDetails()) document.getElementById("h-network").scrollIntoView();
      document.getElementById("details").focus({ preventScroll: true });
    });
    const search = document.getElementById("search");
    const find = () => {
      const query = search.value.trim().toLowerCase();
      rows.forEach((own) => { own.row.hidden = query !== "" && !own.text.includes(query); });
      document.getElementById("match-count").textContent = query ? rows.filter((own) => !own.row.hidden).length + " of " + rows.length : "";
      storeState("search", search.value);
    };
    search.value = storedState("search") || "";
    search.addEventListener("input", find);
    if (search.value) find();
  }

  document.querySelectorAll(".copy").forEach((button) => button.addEventListener("click", async () => {
    const code = button.parentElement.querySelector("code");
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "Copied";
    } catch { // clipboard access denied: select the text instead
      getSelection().selectAllChildren(code);
      button.textContent = "Selected";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  }));

  if (layers.length) {
    const before = layers.findIndex((layer) => layer.name === storedState("layer"));
    selected = before >= 0 ? before : Math.max(0, layers.findIndex((layer) => removedCount(layer) > 0));
  }
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  document.getElementById("theme").addEventListener("click", () => {
    const name = root.dataset.theme === "dark" ? "light" : "dark";
    storeState("theme", name);
    setTheme(name);
  });
  setTheme(root.dataset.theme);
  dark.addEventListener("change", () => setTheme(dark.matches ? "dark" : "light"));
  window.matchMedia("print").addEventListener("change", () => { if (root.dataset.theme === "dark") drawAll(); });

  // A served page polls for changes of its run folder.
  if (document.body.dataset.live) {
    setInterval(async () => {
      try {
        const response = await fetch("version");
        if (response.ok && await response.text() !== document.body.dataset.live) location.reload();
      } catch { /* the server has stopped; keep the page */ }
    }, 2000);
  }
})();
