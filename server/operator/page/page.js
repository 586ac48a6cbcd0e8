// The live page: draws what GET /admin/events tells, and sends what its controls ask for.
// docs/api.md describes the events. Whatever comes from the node is set as text, never as HTML.
"use strict";

const WINDOW = 300; // seconds that are drawn
const LEAST = 60; // of a node that has just begun
const GAP = 3; // seconds without a moment after which nobody watched
const FAINT = 5; // seconds without an event after which the page says so
const MODES = ["dp", "tp", "sp"];
const PRIORITIES = ["urgent", "normal", "background"];
const KEY = "shoal-admin-key";
const SVG = "http://www.w3.org/2000/svg";

const $ = (id) => document.getElementById(id);
const number = new Intl.NumberFormat("en");
const rate = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const still = matchMedia("(prefers-reduced-motion: reduce)");

const state = {
  about: null, // what does not change
  now: null, // the last moment
  bands: [], // what the timeline shows: units over time
  open: new Map(), // those that go on
  rates: [], // [at, {mode: [prompt, output]}]
  switches: [], // the last ones, oldest first
  heard: 0, // when the last event came, by performance.now()
  own: new Set(), // keys of the requests of the prompt box
  key: sessionStorage.getItem(KEY) ?? "",
};

// --- small helpers ---

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function draw(tag, attributes = {}, text = null) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== null) element.textContent = text;
  return element;
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const enginesText = (engines) =>
  engines.length > 1 ? `${engines[0]}–${engines[engines.length - 1]}` : `${engines[0]}`;
const parsed = (unit) => unit.split(",").map(Number);
const isPipeline = (layout) => layout.includes("pp");
// The class that colours a layout: its name, or one for all pipelines.
const kindOf = (layout) => (isPipeline(layout) ? "pp" : layout.split("-")[0]);
const same = (one, other) => JSON.stringify(one) === JSON.stringify(other);

function seconds(value) {
  if (value < 1) return `${(value * 1000).toFixed(value < 0.1 ? 1 : 0)} ms`;
  return `${value.toFixed(value < 10 ? 1 : 0)} s`;
}

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = Math.min(4, Math.floor(Math.log2(Math.max(1, count)) / 10));
  return `${(count / 2 ** (10 * power)).toFixed(power ? 1 : 0)} ${units[power]}`;
}

// --- talking to the node ---

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function call(path, { body, headers = {}, signal } = {}) {
  const all = { "x-shoal-page": "1", ...headers };
  if (state.key) all.authorization = `Bearer ${state.key}`;
  if (body !== undefined) all["content-type"] = "application/json";
  const options = { headers: all, signal, cache: "no-store", credentials: "omit" };
  if (body !== undefined) Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  const response = await fetch(path, options);
  if (response.ok) return response;
  const told = await response.json().catch(() => null);
  if (response.status === 401) askForKey();
  throw new Refused(response.status, told?.error?.message ?? `the node answered ${response.status}`);
}

// The server-sent events of a response, with the names and data of each. EventSource sends no key.
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (let rest = ""; ; ) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const event = { name: "message", data: "" };
        for (const line of block.split("\n")) {
          if (line.startsWith("event: ")) event.name = line.slice(7);
          if (line.startsWith("data: ")) event.data += line.slice(6);
        }
        if (event.data) yield event;
      }
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}

// --- the key ---

let keyGiven = null; // resolves when a key is there

function askForKey() {
  if (keyGiven) return;
  state.key = "";
  sessionStorage.removeItem(KEY);
  keyGiven = Promise.withResolvers ? Promise.withResolvers() : withResolvers();
  $("key-form").hidden = false;
  $("key").focus();
  setHealth("bad", "A key is needed");
}

function withResolvers() {
  const made = {};
  made.promise = new Promise((resolve) => (made.resolve = resolve));
  return made;
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  state.key = $("key").value;
  sessionStorage.setItem(KEY, state.key);
  $("key").value = "";
  $("key-form").hidden = true;
  setHealth("waiting", "Connecting");
  keyGiven?.resolve();
  keyGiven = null;
});

// --- watching ---

let watching = null; // aborts the present stream

async function watch() {
  if (document.body.dataset.needsKey === "true" && !state.key) askForKey();
  for (;;) {
    if (keyGiven) await keyGiven.promise;
    if (document.hidden) await new Promise((resolve) => addEventListener("visibilitychange", resolve, { once: true }));
    watching = new AbortController();
    try {
      const response = await call("/admin/events", { signal: watching.signal });
      for await (const event of eventsOf(response)) take(event);
      setHealth("bad", "The node has ended");
    } catch (error) {
      if (error.name !== "AbortError" && !keyGiven) {
        setHealth("bad", error instanceof Refused ? error.message : "The node cannot be reached");
      }
    }
    if (!document.hidden && !keyGiven) await new Promise((resolve) => setTimeout(resolve, 1000));
  }
}

// A page that nobody sees watches nothing; the history tells it later what it has missed.
addEventListener("visibilitychange", () => document.hidden && watching?.abort());

function take({ name, data }) {
  const told = JSON.parse(data);
  state.heard = performance.now();
  if (name === "history") takeHistory(told);
  else if (name === "moment") takeMoment(told);
  else if (name === "switch") takeSwitch(told);
  else if (name === "trouble") setHealth("bad", told.error);
}

function takeHistory({ about, past, switches, now }) {
  if (!same(about, state.about)) begin(about);
  state.switches = switches;
  [state.bands, state.rates, state.open] = [[], [], new Map()];
  for (const trace of past) record(trace);
  show(now);
  showSwitches();
}

function takeMoment(moment) {
  record(moment.trace);
  show(moment);
}

function takeSwitch(done) {
  state.switches.push(done);
  state.switches.splice(0, state.switches.length - 32);
  showSwitches();
}

setInterval(() => {
  const silent = (performance.now() - state.heard) / 1000;
  if (state.heard && silent > FAINT && !document.hidden && $("health").dataset.state === "good") {
    setHealth("bad", "No news from the node");
  }
}, 1000);

// --- what is drawn over time ---

// Adds a moment to the bands: each band is one unit in one state, from its start to its end.
function record({ at, engines, tokens }) {
  const last = state.rates.length ? state.rates[state.rates.length - 1][0] : null;
  const watched = last !== null && at - last <= GAP;
  const units = [];
  engines.forEach(([unit, layout, of], engine) => {
    const above = units[units.length - 1];
    if (above && above.unit === unit && above.of === of) above.engines.push(engine);
    else units.push({ unit, layout, of, engines: [engine] });
  });
  if (!watched) inferBands(last ?? state.about.since, at, units);
  const before = watched ? state.open : new Map();
  for (const band of before.values()) band.end = at;
  state.open = new Map();
  for (const { unit, layout, of, engines: members } of units) {
    const key = `${unit} ${layout} ${of} ${members[0]}`;
    const band = before.get(key) ?? { unit, layout, of, engines: members, start: at, end: at, seldom: false };
    if (!before.has(key)) state.bands.push(band);
    state.open.set(key, band);
  }
  state.rates.push([at, tokens]);
  const first = at - WINDOW;
  state.bands = state.bands.filter((band) => band.end > first);
  state.rates = state.rates.filter(([then]) => then >= first);
}

// While nobody watched, the record of switches tells the layout, but not whether engines died.
function inferBands(from, until, units) {
  const start = Math.max(from, until - WINDOW);
  let end = until;
  let there = units.map(({ unit, layout }) => [parsed(unit), layout]).filter((each, k, all) => !k || !same(each, all[k - 1]));
  const past = state.switches.filter((done) => done.outcome === "done" && done.at + done.duration_seconds <= until);
  for (const done of past.reverse()) {
    const ended = done.at + done.duration_seconds;
    addInferred(there, Math.max(start, ended), end);
    if (ended <= start) return;
    [end, there] = [ended, done.before.map((engines, k) => [engines, done.before_layouts[k]])];
  }
  addInferred(there, start, end);
}

function addInferred(units, start, end) {
  if (end - start < 0.5) return;
  for (const [engines, layout] of units) {
    state.bands.push({ unit: engines.join(","), layout, of: "", engines, start, end, seldom: true });
  }
}

const ROW = 26;
const SPACE = 5;
const GUTTER = 66;
const TOP = 12;

// The seconds that are drawn: of a young node all, so that its first switches are wide enough to be seen.
const span = (at) => Math.min(WINDOW, Math.max(LEAST, at - state.about.since));

function showTimeline(at) {
  const svg = $("timeline");
  const width = svg.clientWidth || 600;
  const rows = state.about.engines;
  const bottom = TOP + rows * (ROW + SPACE);
  const x = (time) => GUTTER + (width - GUTTER) * Math.max(0, 1 - (at - time) / span(at));
  const y = (engine) => TOP + engine * (ROW + SPACE);
  svg.setAttribute("height", bottom + 18);
  svg.setAttribute("viewBox", `0 0 ${width} ${bottom + 18}`);
  const parts = axis(x, at, TOP, bottom, width);
  for (let engine = 0; engine < rows; engine++) {
    parts.push(draw("text", { x: 0, y: y(engine) + ROW * 0.67 }, `Engine ${engine}`));
  }
  for (const band of state.bands) parts.push(bandShape(band, x, y));
  for (const done of state.switches) {
    if (done.at > at - WINDOW) parts.push(mark(done, x(done.at + done.duration_seconds)));
  }
  svg.replaceChildren(...parts);
  const units = state.now.units.map((unit) => `${unitName(unit)} ${unit.state}`).join("; ");
  svg.setAttribute("aria-label", `Layout over the last five minutes; now: ${units}`);
}

function axis(x, at, top, bottom, width) {
  const parts = [];
  const most = Math.floor(span(at) / 60);
  for (let minutes = most; minutes >= 0; minutes--) {
    const where = x(at - minutes * 60);
    const line = draw("g", { class: "axis" });
    line.append(draw("line", { x1: where, x2: where, y1: top, y2: bottom }));
    const anchor = minutes === 0 ? "end" : minutes === most ? "start" : "middle";
    if (minutes % 2 === 0 || width > 480 || most < 4) {
      line.append(draw("text", { x: where, y: bottom + 14, "text-anchor": anchor }, minutes ? `−${minutes} min` : "now"));
    }
    parts.push(line);
  }
  return parts;
}

function bandShape(band, x, y) {
  const start = x(band.start);
  const width = Math.max(1, x(band.end) - start);
  const size = band.engines.length;
  const classes = ["band", kindOf(band.layout), band.of, band.seldom ? "seldom" : ""];
  const group = draw("g", { class: classes.filter(Boolean).join(" "), "data-unit": band.unit });
  const top = y(band.engines[0]);
  const height = size * ROW + (size - 1) * SPACE;
  group.append(draw("rect", { x: start, y: top, width, height, rx: Math.min(3, width / 2) }));
  const note = band.seldom ? "from the record of switches: nobody watched" : band.of;
  const name = `${band.layout.toUpperCase()} ${enginesText(parsed(band.unit))}`;
  group.append(draw("title", {}, `${name}, ${note}`));
  const text = band.of && band.of !== "serving" ? `${name} ${band.of}` : name;
  if (width > text.length * 7.5 + 10) {
    group.append(draw("text", { x: start + 7, y: top + height / 2 + 4 }, text));
  }
  return group;
}

function mark(done, where) {
  const group = draw("g", { class: done.outcome === "done" ? "mark" : "mark failed" });
  group.append(
    draw("path", { d: `M${where - 5} ${TOP - 11}h10l-5 8z` }),
    draw("title", {}, `switch ${done.epoch}: ${done.reason}, ${seconds(done.duration_seconds)}`),
  );
  return group;
}

function showRates(at, tokens) {
  const svg = $("rates");
  const width = svg.clientWidth || 400;
  const height = 96;
  const most = Math.max(1, ...state.rates.map(([, of]) => MODES.reduce((sum, mode) => sum + of[mode][1], 0)));
  const step = 10 ** Math.floor(Math.log10(most));
  const top = Math.ceil(most / step) * step;
  const x = (time) => width * Math.max(0, 1 - (at - time) / span(at));
  const y = (value) => 14 + (height - 14) * (1 - value / top);
  svg.setAttribute("height", height + 18);
  svg.setAttribute("viewBox", `0 0 ${width} ${height + 18}`);
  const parts = axis(x, at, 14, height, width);
  const below = state.rates.map(() => 0);
  for (const mode of MODES) {
    const upper = [];
    const lower = [];
    state.rates.forEach(([then, of], k) => {
      const gap = k && then - state.rates[k - 1][0] > GAP ? "M" : "L";
      lower.unshift(`L${x(then).toFixed(1)} ${y(below[k]).toFixed(1)}`);
      below[k] += of[mode][1];
      upper.push(`${upper.length ? gap.replace("M", "L") : "M"}${x(then).toFixed(1)} ${y(below[k]).toFixed(1)}`);
    });
    if (upper.length > 1) parts.push(draw("path", { class: `area ${mode}`, d: `${upper.join("")}${lower.join("")}Z` }));
  }
  parts.push(draw("text", { x: 0, y: 10 }, number.format(top)));
  svg.replaceChildren(...parts);
  for (const mode of MODES) {
    const [prompt, output] = tokens[mode];
    fillRow($("rate-rows"), mode, [rate.format(output), rate.format(prompt)], () => make("i", { class: `swatch ${mode}` }), mode.toUpperCase());
  }
}

// Fills the row of a table that has this name, and makes it first if it is not there.
function fillRow(body, name, cells, icon, title) {
  let row = body.querySelector(`[data-name="${name}"]`);
  if (!row) {
    row = make("tr", { "data-name": name }, make("th", { scope: "row" }, ...(icon ? [icon()] : []), title));
    row.append(...cells.map(() => make("td")));
    body.append(row);
  }
  cells.forEach((text, k) => setText(row.cells[k + 1], text));
}

// --- the present ---

function begin(about) {
  state.about = about;
  document.body.dataset.told = "true";
  setText($("model"), about.model);
  document.title = `${about.model} – Shoal`;
  const sizes = [1, 2, 4, 8].filter((size) => size <= about.max_group);
  const layouts = sizes.map((size) => (size > 1 ? `tp${size}` : "dp"));
  if (about.max_pp > 1) layouts.push("pp");
  $("layout-legend").replaceChildren(
    ...layouts.map((layout) => make("li", {}, make("i", { class: `swatch ${layout}` }), layout === "pp" ? "pipeline" : layout.toUpperCase())),
    make("li", {}, make("i", { class: "swatch dead" }), "dead or silent"),
    make("li", {}, "▾ switch"),
  );
  $("layouts").replaceChildren(...partitions(about.engines, about.max_group).map(layoutButton));
  $("policies").replaceChildren(...Object.keys(about.policies).sort().map(policyButton));
  for (const id of ["units", "memory", "rate-rows", "pool-rows"]) $(id).replaceChildren();
}

function setHealth(kind, text) {
  $("health").dataset.state = kind;
  setText($("health"), text);
}

function show(moment) {
  state.now = moment;
  const at = moment.trace.at;
  if (!moment.ready) setHealth("bad", `Not ready: ${moment.reason}`);
  else {
    const lost = moment.engines.filter((engine) => engine.state !== "serving");
    if (lost.length) setHealth("bad", lost.map((engine) => `Engine ${engine.engine} is ${engine.state}`).join(", "));
    else setHealth("good", "Ready");
  }
  showControls(moment);
  showUnits(moment);
  showMemory(moment);
  setText($("sharing"), moment.sharing);
  for (const name of PRIORITIES) {
    const waiting = moment.trace.waiting[name];
    fillRow($("pool-rows"), name, [number.format(waiting), waiting ? seconds(moment.oldest[name]) : "–"], null, name);
  }
  showTimeline(at);
  showRates(at, moment.trace.tokens);
}

const unitName = (unit) => `${enginesText(unit.engines)} ${unit.layout.toUpperCase()}`;

function showUnits({ units }) {
  const box = $("units");
  box.className = `of-${state.about.engines}`;
  const dots = new Map([...box.querySelectorAll(".dot")].map((dot) => [dot.dataset.key, dot]));
  const places = new Map([...dots].map(([key, dot]) => [key, dot.getBoundingClientRect()]));
  const homes = new Map([...dots].map(([key, dot]) => [key, dot.parentElement.parentElement.dataset.unit]));
  const cards = new Map([...box.children].map((card) => [`${card.dataset.unit} ${card.dataset.layout}`, card]));
  const shown = units.map((unit) => {
    const name = unit.engines.join(",");
    const card = cards.get(`${name} ${unit.layout}`) ?? unitCard(name, unit);
    const told = card.querySelectorAll("p");
    const counts = [[unit.running, "running"], [unit.waiting, "waiting"], [unit.paused, "paused"]];
    const said = counts.filter(([count], k) => count || !k).map(([count, what]) => `${number.format(count)} ${what}`);
    setText(told[0], said.join(", "));
    setText(told[1], unit.state === "serving" ? "" : unit.state);
    card.querySelector(".dots").replaceChildren(...unit.requests.map((request) => dotOf(request, dots)));
    return card;
  });
  if (shown.length !== cards.size || shown.some((card, k) => card !== box.children[k])) box.replaceChildren(...shown);
  for (const card of shown) {
    for (const dot of card.querySelectorAll(".dot")) move(dot, places, homes, card.dataset.unit);
  }
}

function unitCard(name, unit) {
  const classes = `unit ${kindOf(unit.layout)} size-${unit.engines.length}`;
  const card = make("div", { class: classes, "data-unit": name, "data-layout": unit.layout });
  card.append(
    make("h3", {}, `${unit.layout.toUpperCase()} ${enginesText(unit.engines)}`),
    make("div", { class: "dots", "aria-hidden": "true" }),
    make("p"),
    make("p", { class: "state" }),
  );
  return card;
}

function dotOf([key, priority, paused], dots) {
  const dot = dots.get(key) ?? make("i", { "data-key": key });
  const kind = priority < 0 ? "urgent" : priority > 0 ? "background" : "";
  dot.className = `dot ${kind} ${paused ? "paused" : ""} ${state.own.has(key) ? "own" : ""}`;
  return dot;
}

// Lets a request that has gone to another unit be seen on its way.
function move(dot, places, homes, unit) {
  const from = places.get(dot.dataset.key);
  if (!from || homes.get(dot.dataset.key) === unit || still.matches) return;
  const to = dot.getBoundingClientRect();
  const start = `translate(${from.x - to.x}px, ${from.y - to.y}px)`;
  dot.animate([{ transform: start }, { transform: "none" }], { duration: 700, easing: "ease-in-out" });
}

function showMemory({ engines }) {
  const box = $("memory");
  if (box.children.length !== engines.length) {
    box.replaceChildren(
      ...engines.map((engine) =>
        make(
          "div",
          { class: "memory" },
          make("span", {}, `Engine ${engine.engine}`),
          make("div", { class: "bar", "aria-hidden": "true" }, make("i", { class: "used" }), make("i", { class: "lent" })),
          ...["used", "lent", "free"].map(() => make("span", { class: "count" })),
          make("span", { class: "note" }),
        ),
      ),
    );
  }
  engines.forEach(({ kv, drained }, k) => {
    const [, bar, used, lent, free, note] = box.children[k].children;
    const total = Math.max(1, kv.used + kv.lent + kv.free);
    bar.children[0].style.width = `${(100 * kv.used) / total}%`;
    bar.children[1].style.width = `${(100 * kv.lent) / total}%`;
    setText(used, `${number.format(kv.used)} used`);
    setText(lent, `${number.format(kv.lent)} lent`);
    setText(free, `${number.format(kv.free)} free`);
    setText(note, drained ? "drained" : "");
  });
}

function showSwitches() {
  const items = [...state.switches].reverse().map((done) => {
    const arrow = [...unitNames(done.before, done.before_layouts), "→", ...unitNames(done.after, done.after_layouts)];
    const why = `${done.reason || "no reason given"}, ${done.preempt}${done.late ? ", late" : ""}`;
    const when = new Date(done.at * 1000).toLocaleTimeString("en-GB");
    return make(
      "li",
      { "data-epoch": done.epoch },
      make("span", { class: "when" }, when),
      make("span", { class: "arrow" }, ...arrow.flatMap((part) => [make("span", {}, part), " "]).slice(0, -1)),
      make("span", { class: "why" }, why),
      make("span", { class: "took" }, seconds(done.duration_seconds)),
      make("span", { class: done.error ? "what failed" : "what" }, done.error ?? carried(done)),
    );
  });
  $("switches").replaceChildren(...(items.length ? items : [make("li", {}, "None yet.")]));
}

function unitNames(units, layouts) {
  const named = (unit, layout) => `[${enginesText(unit)}]${isPipeline(layout) ? ` ${layout.toUpperCase()}` : ""}`;
  return units.map((unit, k) => named(unit, layouts[k]));
}

function carried({ requests, carried_bytes, precopied_bytes }) {
  const recomputed = Object.values(requests.recomputed).reduce((sum, count) => sum + count, 0);
  const copied = carried_bytes + precopied_bytes;
  const parts = [
    [requests.carried, copied ? `carried with ${bytes(copied)}` : "carried"],
    [recomputed, "carried without KV"],
    [requests.moved, "moved"],
    [requests.paused, "paused"],
    [requests.resumed, "resumed"],
    [requests.drained, "waited for"],
  ];
  const said = parts.filter(([count]) => count).map(([count, what]) => `${number.format(count)} ${what}`);
  return said.join(", ") || "no request concerned";
}

// --- what operators do ---

// The partitions on offer: all of up to four engines; of more, those into groups of one size, and
// one large group beside engines alone.
function partitions(engines, maxGroup) {
  const sizes = [1, 2, 4, 8].filter((size) => size <= maxGroup && size <= engines);
  const run = (first, size) => Array.from({ length: size }, (_, k) => first + k);
  const uniform = (size, until = engines) => Array.from({ length: until / size }, (_, k) => run(k * size, size));
  const all = (first, length) => {
    if (length === 1) return [[[first]]];
    const half = length / 2;
    const split = all(first, half).flatMap((left) => all(first + half, half).map((right) => [...left, ...right]));
    return length <= maxGroup ? [...split, [run(first, length)]] : split;
  };
  if (engines <= 4) return all(0, engines);
  const half = engines / 2;
  const mixed = half <= maxGroup ? [[run(0, half), ...run(half, half).map((engine) => [engine])]] : [];
  return [...sizes.map((size) => uniform(size)), ...mixed];
}

function layoutButton(units) {
  const spoken = units.map((unit) => (unit.length > 1 ? `${enginesText(unit)} together` : `${unit[0]} alone`));
  const button = make("button", { type: "button", "aria-label": `Engines ${spoken.join(", ")}`, "data-units": JSON.stringify(units) });
  const colour = (unit) => (unit.length > 1 ? `tp${unit.length}` : "dp"); // that of the unit's band
  button.append(...units.map((unit) => make("span", { class: `group ${colour(unit)}` }, enginesText(unit))));
  button.addEventListener("click", () => switchTo(units));
  return button;
}

function policyButton(policy) {
  const button = make("button", { type: "button", "data-policy": policy }, policy);
  button.addEventListener("click", () => setPolicy(policy));
  return button;
}

function showControls({ policy, units, ready }) {
  const there = units.map((unit) => unit.engines);
  const pipeline = units.some((unit) => isPipeline(unit.layout)); // no button asks for one
  const decides = state.about.policies[policy];
  for (const button of $("layouts").children) {
    button.setAttribute("aria-pressed", !pipeline && same(JSON.parse(button.dataset.units), there));
    button.disabled = decides || !ready;
  }
  for (const button of $("policies").children) {
    button.setAttribute("aria-pressed", button.dataset.policy === policy);
  }
  setText($("layout-note"), decides ? `The policy ${policy} decides the layout: choose manual to switch by hand.` : "");
}

function answer(kind, text) {
  $("answer").dataset.state = kind;
  setText($("answer"), text);
}

async function ask(path, body, asking, said) {
  answer("waiting", asking);
  try {
    const response = await call(path, { body });
    answer("good", said(await response.json()));
  } catch (error) {
    answer("bad", error instanceof Refused ? error.message : "The node cannot be reached");
  }
}

const switchTo = (units) =>
  ask("/admin/layout", { units, preempt: $("treatment").value }, "Switching", (done) => {
    const took = `Switch to ${unitNames(done.after, done.after_layouts).join(" ")} took ${seconds(done.duration_seconds)}`;
    return `${took}: ${carried(done)}.`;
  });

const setPolicy = (policy) =>
  ask("/admin/policy", { policy }, "Changing the policy", (done) => `The policy is now ${done.policy}.`);

// --- the prompt box ---

let prompting = null; // aborts the present prompt

$("prompt-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (prompting || !state.about) return;
  prompting = new AbortController();
  [$("send").disabled, $("stop").disabled] = [true, false];
  $("reply").replaceChildren();
  setText($("ran"), "Waiting for a unit");
  const began = { kind: "", trail: [], text: null };
  try {
    await stream(began);
    setText($("ran"), `Ended; it ran on ${began.trail.join(", then ") || "no unit"}.`);
  } catch (error) {
    const why = error.name === "AbortError" ? "Stopped" : error instanceof Refused ? error.message : "The node cannot be reached";
    setText($("ran"), began.trail.length ? `${why}; it ran on ${began.trail.join(", then ")}.` : why);
  }
  prompting = null;
  state.own.clear();
  [$("send").disabled, $("stop").disabled] = [false, true];
});

$("stop").addEventListener("click", () => prompting?.abort());

$("prompt-text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("prompt-form").requestSubmit();
});

async function stream(began) {
  const response = await call("/admin/chat/completions", {
    signal: prompting.signal,
    headers: { "x-vllm-priority": $("priority").value },
    body: {
      model: state.about.model,
      stream: true,
      max_tokens: Number($("tokens").value),
      messages: [{ role: "user", content: $("prompt-text").value }],
    },
  });
  for await (const { name, data } of eventsOf(response)) {
    if (data === "[DONE]") return;
    const told = JSON.parse(data);
    if (name === "unit") onUnit(began, told);
    else if (told.error) throw new Refused(told.error.code, told.error.message);
    else addText(began, told.choices?.[0]?.delta ?? {});
  }
}

// The reply names the unit wherever another one goes on with it.
function onUnit(began, { unit, layout, requests }) {
  const name = `${layout.toUpperCase()} ${enginesText(parsed(unit))}`;
  began.kind = kindOf(layout);
  began.text = null;
  began.trail.push(name);
  state.own = new Set(requests);
  $("reply").append(make("b", { class: began.kind, "data-unit": unit }, name));
  setText($("ran"), `Runs on ${name}${began.trail.length > 1 ? ` (before: ${began.trail.slice(0, -1).join(", ")})` : ""}`);
}

function addText(began, delta) {
  const text = delta.content ?? delta.reasoning ?? delta.reasoning_content;
  if (!text) return;
  if (!began.text) $("reply").append((began.text = make("span", { class: began.kind })));
  const reply = $("reply");
  const atEnd = reply.scrollHeight - reply.scrollTop - reply.clientHeight < 40;
  began.text.append(text);
  if (atEnd) reply.scrollTop = reply.scrollHeight;
}

// --- start ---

new ResizeObserver(() => state.now && (showTimeline(state.now.trace.at), showRates(state.now.trace.at, state.now.trace.tokens))).observe($("timeline"));
watch();
