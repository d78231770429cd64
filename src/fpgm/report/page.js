"use strict";
(() => {
  const root = document.documentElement;
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const specs = read("specs");
  const layers = read("layers");
  const make = (tag, text, name) => {
    const node = document.createElement(tag);
    if (text !== undefined) node.textContent = text;
    if (name) node.className = name;
    return node;
  };
  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();

  // Charts take their letters and lines from the page, so that they follow its theme.
  const config = () => {
    const ink = colour("--ink"), line = colour("--line");
    const font = "system-ui, 'Segoe UI', Helvetica, Arial, sans-serif";
    return {
      background: null, font, view: { stroke: null },
      axis: { labelColor: ink, titleColor: ink, domainColor: line, tickColor: line, grid: true,
        gridColor: line, gridOpacity: 0.5, labelFontSize: 11, titleFontSize: 12, titleFontWeight: "normal" },
      legend: { labelColor: ink, titleColor: ink, orient: "bottom", title: null, labelFontSize: 11, columnPadding: 6 },
      title: { color: ink, anchor: "start", fontWeight: "normal" }, text: { color: ink },
    };
  };
  const draw = (place, spec) =>
    vegaEmbed(place, spec, { renderer: "svg", actions: false, config: config() }).catch((error) => {
      place.textContent = "This chart cannot be drawn: " + error.message;
    });
  const drawAll = () =>
    document.querySelectorAll("[data-chart]").forEach((place) => draw(place, specs[Number(place.dataset.chart)]));

  const setTheme = (name) => {
    root.dataset.theme = name;
    const button = document.getElementById("theme");
    button.setAttribute("aria-pressed", String(name === "dark"));
    button.textContent = name === "dark" ? "Light" : "Dark";
    drawAll();
    if (chosen !== null) choose(chosen, false);
  };

  // One layer.
  let chosen = null;
  const percent = (share) => (100 * share).toFixed(1) + " %";
  const sentence = (layer) => {
    const gone = layer.filters - layer.kept;
    if (!gone) return layer.filters + " filters, all of which stay.";
    return layer.filters + " filters, of which " + gone + " (" + percent(gone / layer.filters) + ") go.";
  };
  const points = (layer) => layer.norms.map((norm, n) => ({
    filter: n, norm, kind: layer.removed.includes(n) ? "removed" : "kept",
    x: layer.places[n][0], y: layer.places[n][1], distance: layer.to_median[n],
  }));
  const kinds = (middle) => ({
    domain: ["kept", "removed"].concat(middle ? ["median"] : []),
    range: [colour("--kept"), colour("--gone")].concat(middle ? [colour("--ink")] : []),
  });
  const normSpec = (layer) => ({
    width: "container", height: 170, data: { values: points(layer) },
    layer: [
      { transform: [{ density: "norm", as: ["norm", "density"] }], mark: { type: "area", opacity: 0.25, color: colour("--kept"), line: { color: colour("--kept") } },
        encoding: { x: { field: "norm", type: "quantitative", title: "norm" }, y: { field: "density", type: "quantitative", title: "density" } } },
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
  const choose = (number, move) => {
    chosen = number;
    const layer = layers[number];
    document.querySelectorAll(".layer").forEach((button) =>
      button.setAttribute("aria-pressed", String(Number(button.dataset.layer) === number)));
    const place = document.getElementById("details");
    place.replaceChildren(make("h3", layer.name), make("p", sentence(layer)));
    if (layer.group) place.append(make("p", "Group: " + layer.group + "."));
    if (layer.why) place.append(make("p", "Left whole: " + layer.why + "."));
    if (layer.verdict) place.append(make("p", "Norms: " + layer.verdict + "."));
    if (layer.error) place.append(make("p", "Error of its output, solved for: " + layer.error.map((v) => v === null ? "?" : v.toPrecision(2)).join(" → ") + "."));
    if (layer.norms && layer.places) {
      const strip = make("div", undefined, "strip");
      strip.setAttribute("role", "img");
      strip.setAttribute("aria-label", layer.removed.length ? "Removed: " + layer.removed.join(", ") : "No filter is removed");
      layer.norms.map((norm, n) => n).sort((a, b) => layer.to_median[a] - layer.to_median[b]).forEach((n) => {
        const cell = make("span", undefined, layer.removed.includes(n) ? "gone" : "");
        cell.title = "filter " + n + ", norm " + layer.norms[n] + ", " + layer.to_median[n] + " from the median";
        strip.append(cell);
      });
      const pair = make("div", undefined, "pair");
      const left = make("div", undefined, "chart"), right = make("div", undefined, "chart");
      left.id = "norms"; right.id = "map";
      pair.append(left, right);
      place.append(make("p", "Filters from the nearest to the geometric median to the farthest; framed ones go:", "caption"), strip, pair);
      pair.after(make("p", "Their norms; and the plane in which they spread most around their geometric median.", "caption"));
      draw(left, normSpec(layer));
      draw(right, mapSpec(layer));
    }
    if (move) place.focus({ preventScroll: false });
  };
  document.querySelectorAll(".layer").forEach((button) =>
    button.addEventListener("click", () => choose(Number(button.dataset.layer), false)));
  document.querySelectorAll(".link").forEach((button) => button.addEventListener("click", () => {
    choose(Number(button.dataset.layer), true);
    document.getElementById("h-network").scrollIntoView();
  }));

  // The table.
  const table = document.getElementById("table");
  if (table) {
    const body = table.tBodies[0];
    const all = Array.from(body.rows);
    const value = (row, column, kind) => {
      const cell = row.cells[column];
      return kind === "number" ? Number(cell.dataset.value ?? cell.textContent) : cell.textContent;
    };
    table.querySelectorAll("[data-sort]").forEach((button) => button.addEventListener("click", () => {
      const head = button.parentElement, column = Number(button.dataset.sort), kind = button.dataset.kind;
      const up = head.getAttribute("aria-sort") !== "ascending";
      table.querySelectorAll("thead th").forEach((other) => other.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const sorted = Array.from(body.rows).sort((a, b) => {
        const x = value(a, column, kind), y = value(b, column, kind);
        const order = kind === "number" ? x - y : x.localeCompare(y, undefined, { numeric: true });
        return up ? order : -order;
      });
      body.append(...sorted);
    }));
    const search = document.getElementById("search");
    search.addEventListener("input", () => {
      const wanted = search.value.trim().toLowerCase();
      let count = 0;
      all.forEach((row) => {
        row.hidden = wanted !== "" && !row.textContent.toLowerCase().includes(wanted);
        count += row.hidden ? 0 : 1;
      });
      document.getElementById("found").textContent = wanted ? count + " of " + all.length : "";
    });
  }

  const copy = document.getElementById("copy");
  if (copy) copy.addEventListener("click", async () => {
    await navigator.clipboard.writeText(document.getElementById("command").textContent);
    copy.textContent = "Copied";
  });

  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  document.getElementById("theme").addEventListener("click", () =>
    setTheme(root.dataset.theme === "dark" ? "light" : "dark"));
  setTheme(dark.matches ? "dark" : "light");
  dark.addEventListener("change", () => setTheme(dark.matches ? "dark" : "light"));
  if (layers.length) choose(Math.max(0, layers.findIndex((layer) => layer.removed.length)), false);

  // A page that is served asks whether its folder has changed.
  if (document.body.hasAttribute("data-live")) {
    let known = null;
    setInterval(async () => {
      try {
        const told = await (await fetch("version")).text();
        if (known !== null && told !== known) location.reload();
        known = told;
      } catch { /* the server is gone; the page stays */ }
    }, 2000);
  }
})();
