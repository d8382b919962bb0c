// The controller's page: asks /v1/status, /v1/decisions and /v1/worth every two seconds and shows
// them. Owns: how the pool looks in a browser. Must not know: how any number comes about.
// Whatever the pool says is put in as text, never as markup.
"use strict";

const INTERVAL_MS = 2000;
const KEPT = 150; // samples in the chart: five minutes
const TIMEOUT_MS = 5000;
const SHOWN = 15; // rows of residents and of decisions
const TIERS = ["local", "arena", "ssd", "cold", "switch", "shared", "home", "bulk"]; // protocol/messages/local.py
const MEANING = {
  local: "in the node's own memory", arena: "from a further arena", switch: "from switch memory",
  shared: "by a multicast for several readers", home: "from the home alone",
  bulk: "from the home by bulk transfer", ssd: "from an SSD", cold: "from the object store", missed: "not found",
};
const MEMORIES = { dram: "DRAM MiB", arena: "arenas MiB", ssd: "SSD MiB", cold: "cold MiB" };
const STYLES = { // of states: controller/core/node_report.py
  dead: "bad", silent: "warn", draining: "warn", drained: "", joining: "warn", alive: "good",
};
const MIB = 2 ** 20;

const samples = []; // {at (ms), agents (by node: name -> value)}, oldest first
let paused = false;
let token = sessionStorage.getItem("kvcast-token") || "";
let timer = 0;

const $ = (id) => document.getElementById(id);

function element(name, text = "", style = "") {
  const made = document.createElement(name);
  if (text !== "") made.textContent = String(text);
  if (style) made.className = style;
  return made;
}

function svg(name, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

const count = (value) => Math.round(value).toLocaleString("en");
const mib = (bytes) => (bytes / MIB).toLocaleString("en", { maximumFractionDigits: 1 });

function bytes(value) {
  for (const [unit, size] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", MIB], ["KiB", 1024]]) {
    if (value >= size) return `${(value / size).toFixed(1)} ${unit}`;
  }
  return `${Math.round(value)} B`;
}

// --- asking -------------------------------------------------------------------------------------

async function ask(path) {
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const answer = await fetch(path, {
    headers, cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS),
  });
  if (answer.status === 401 || answer.status === 403) throw new Refused();
  const body = await answer.json();
  if (!answer.ok) throw new Error(`${path}: ${answer.status} ${body.error || ""}`);
  return body;
}

class Refused extends Error {}

async function round() {
  try {
    const [status, decisions, worth] =
      await Promise.all(["v1/status", "v1/decisions", "v1/worth"].map(ask));
    $("login").hidden = true;
    $("problem").hidden = true;
    $("main").hidden = false;
    show(status, decisions.decisions, worth);
  } catch (error) {
    if (error instanceof Refused) {
      $("main").hidden = true;
      $("login").hidden = false;
      problem(token ? "The controller refuses this token." : "");
      return; // the form goes on
    }
    problem(`The controller does not answer: ${error.message}. What is shown is the last that it said.`);
  }
  if (!paused) timer = setTimeout(round, INTERVAL_MS);
}

function problem(text) {
  $("problem").textContent = text;
  $("problem").hidden = text === "";
}

// --- numbers ------------------------------------------------------------------------------------

const sum = (values) => values.reduce((total, value) => total + value, 0);
const sent = (counters) =>
  (counters.payload_bytes_sent_udp_total || 0) + (counters.payload_bytes_sent_bulk_get_total || 0);

// What a node's counter grew by a second between two samples; a restarted agent counts from 0.
function rate(before, after, node, value) {
  const earlier = before && before.agents[node];
  if (!earlier || !after.agents[node]) return 0;
  const grown = value(after.agents[node]) - value(earlier);
  return Math.max(0, grown) / ((after.at - before.at) / 1000);
}

function poolRate(before, after, value) {
  return sum(Object.keys(after.agents).map((node) => rate(before, after, node, value)));
}

const hits = (tier) => (counters) =>
  tier === "missed" ? counters.misses_total || 0 : counters[`hits_${tier}_total`] || 0;

// A quantile of fetch times in seconds, as Prometheus' histogram_quantile has it; null without any.
function quantile(counters, q) {
  const start = 'fetch_seconds_bucket{le="';
  const buckets = Object.entries(counters)
    .filter(([name]) => name.startsWith(start))
    .map(([name, value]) => {
      const bound = name.slice(start.length, -2);
      return [bound === "+Inf" ? Infinity : Number(bound), value];
    })
    .sort((one, other) => one[0] - other[0]);
  if (!buckets.length || !buckets[buckets.length - 1][1]) return null;
  const rank = q * buckets[buckets.length - 1][1];
  let lower = 0, below = 0;
  for (const [bound, value] of buckets) {
    if (value >= rank && value > below) {
      if (bound === Infinity) break;
      return lower + (bound - lower) * Math.max(0, rank - below) / (value - below);
    }
    [lower, below] = [bound, value];
  }
  return lower;
}

function ms(counters, q) {
  const seconds = quantile(counters, q);
  return seconds === null ? "–" : (seconds * 1000).toFixed(seconds < 0.001 ? 2 : 1);
}

// --- showing ------------------------------------------------------------------------------------

function show(status, decisions, worth) {
  const now = { at: performance.now(), agents: status.agents || {} };
  const before = samples[samples.length - 1];
  samples.push(now);
  if (samples.length > KEPT) samples.shift();
  summary(status);
  tiles(status, before, now);
  chart(status, now);
  nodes(status, before, now);
  switchTables(status);
  worthText(worth);
  namespaces(status);
  decisionTable(decisions);
}

function summary(status) {
  const link = status.switch || {};
  const state = !link.connected
    ? `switch ${link.address}: not connected${link.last_error ? ` (${link.last_error})` : ""}`
    : link.programmed ? `switch ${link.address}` : `switch ${link.address}: being programmed`;
  $("summary").textContent = `epoch ${status.epoch} · ${state}` +
    (status.plain ? " · used as a plain switch" : ` · admission ${status.admit}`);
  $("summary").className = link.connected ? (link.programmed ? "" : "warn") : "bad";
}

function tiles(status, before, now) {
  const alive = status.nodes.filter((node) => node.alive).length;
  const got = sum(TIERS.map((tier) => poolRate(before, now, hits(tier))));
  const missed = poolRate(before, now, hits("missed"));
  const slots = status.slots || { total: 0, free: 0 };
  const used = sum(status.nodes.map((node) => node.arena_used_bytes));
  const all = sum(status.nodes.map((node) => node.arena_bytes));
  const shown = [
    ["nodes alive", `${alive} of ${status.nodes.length}`],
    ["blocks got a second", count(got)],
    ["of gets found", got + missed ? `${(100 * got / (got + missed)).toFixed(1)} %` : "–"],
    ["leaves the homes", `${bytes(poolRate(before, now, sent))}/s`],
    ["DRAM in use", `${bytes(used)} of ${bytes(all)}`],
    ["switch segment slots", `${slots.total - slots.free} of ${slots.total}`],
  ];
  $("tiles").replaceChildren(...shown.map(([label, value]) => {
    const tile = element("div", "", "tile");
    tile.append(element("b", value), element("span", label));
    return tile;
  }));
}

// Where blocks come from in this pool: memory that no node has is left out, unless some came from it.
const sources = (status, now) => TIERS.filter((tier) => !(tier in MEMORIES)
  || status.nodes.some((node) => node.tiers[tier])
  || Object.values(now.agents).some(hits(tier)));

// Stacked areas: one a tier, and on top what was not found.
function chart(status, now) {
  const width = 1000, height = 160, top = 16, bottom = 4;
  const layers = [...sources(status, now), "missed"];
  const points = samples.slice(1).map((after, at) =>
    layers.map((layer) => poolRate(samples[at], after, hits(layer))));
  const highest = Math.max(1, ...points.map(sum));
  const x = (at) => width - (points.length - 1 - at) * (width / (KEPT - 2));
  const y = (value) => height - bottom - value / highest * (height - top - bottom);
  const drawn = $("tiers");
  drawn.setAttribute("viewBox", `0 0 ${width} ${height}`);
  drawn.setAttribute("preserveAspectRatio", "none");
  drawn.replaceChildren();
  const base = points.map(() => 0);
  for (const [number, layer] of layers.entries()) {
    const lower = points.map((_, at) => `${x(at)},${y(base[at])}`).reverse();
    points.forEach((values, at) => { base[at] += values[number]; });
    const upper = points.map((_, at) => `${x(at)},${y(base[at])}`);
    if (points.some((values) => values[number] > 0)) {
      const area = svg("polygon", { points: [...upper, ...lower].join(" ") });
      area.style.fill = `var(--${layer})`;
      drawn.append(area);
    }
  }
  $("legend").replaceChildren(
    ...layers.map((layer) => {
      const item = element("span"), swatch = element("span", "", "swatch");
      swatch.style.background = `var(--${layer})`;
      item.append(swatch, `${layer}: ${MEANING[layer]}`);
      return item;
    }),
    element("span", `top of the chart: ${count(highest)} a second; width: five minutes`),
  );
}

// Rows are lists of cells: a text or number, or {text, style}, or an element.
function fill(table, head, rows, empty, caption = "") {
  const words = (cell) => cell instanceof Object && cell.style === "words";
  const line = element("tr");
  head.forEach((title) => {
    const cell = element("th", words(title) ? title.text : title, words(title) ? "words" : "");
    cell.scope = "col";
    line.append(cell);
  });
  const body = element("tbody");
  for (const row of rows) {
    const made = element("tr");
    for (const cell of row) {
      if (cell instanceof Node) {
        const holder = element("td");
        holder.append(cell);
        made.append(holder);
      } else if (cell instanceof Object) made.append(element("td", cell.text, cell.style));
      else made.append(element("td", cell));
    }
    body.append(made);
  }
  const top = element("thead");
  top.append(line);
  table.replaceChildren(...(rows.length ? [top, body] : []));
  const note = rows.length ? caption : empty;
  if (note) table.prepend(element("caption", note));
}

const left = (text) => ({ text, style: "words" });

const state = (node) => ({ text: node.state, style: `words ${STYLES[node.state] || ""}` });

// What lies in a node's tier, and how much would; of an object store nobody knows that.
function memory(tier) {
  if (!tier) return "–";
  if (!tier.size_bytes) return mib(tier.used_bytes);
  const holder = element("span"), bar = element("progress");
  bar.max = tier.size_bytes;
  bar.value = tier.used_bytes;
  holder.append(bar, ` ${mib(tier.used_bytes)} / ${mib(tier.size_bytes)}`);
  return holder;
}

// What a node sends of what its link carries, where that is known.
const load = (node) => node.link_bits_per_s ? `${count(100 * node.load)} %` : "–";

function nodes(status, before, now) {
  const sorted = [...status.nodes].sort((one, other) => one.switch_port - other.switch_port);
  const memories = Object.keys(MEMORIES).filter((tier) => sorted.some((node) => node.tiers[tier]));
  const layers = [...sources(status, now), "missed"];
  fill($("nodes"),
    [left("node"), "port", left("state"), "buckets", "blocks",
      ...memories.map((tier) => MEMORIES[tier]),
      ...layers, "p50 ms", "p99 ms", "sent MiB/s", "link"],
    sorted.map((node) => {
      const counters = now.agents[node.node_id] || {};
      return [
        left(node.node_id), node.switch_port, state(node), count(node.buckets), count(node.blocks),
        ...memories.map((tier) => memory(node.tiers[tier])),
        ...layers.map((layer) => count(hits(layer)(counters))),
        ms(counters, 0.5), ms(counters, 0.99), mib(rate(before, now, node.node_id, sent)),
        load(node),
      ];
    }),
    "No node has joined yet.",
    "Blocks got by where they came from, and fetch times, since each agent started; link: what it " +
    "sends now, of what its link carries.");
}

function switchTables(status) {
  const told = [
    ["packets by the switch program's decision", status.decisions],
    ["chunks offered to its memory", status.fills],
  ].filter(([, counts]) => counts && Object.keys(counts).length);
  $("switch").replaceChildren(...told.flatMap(([title, counts]) => [
    element("span", `${title}:`),
    ...Object.entries(counts).map(([name, value]) => {
      const item = element("span", `${name} `);
      item.append(element("b", count(value)));
      return item;
    }),
    element("br"),
  ].flatMap((part) => [part, " "])));
  const residents = [...(status.residents || [])].sort((one, other) => other.hits - one.hits);
  fill($("residents"),
    ["namespace", left("key"), "KiB", "hits", "value", "age s", left("")],
    residents.slice(0, SHOWN).map((resident) => [
      resident.namespace, { text: resident.key, style: "key" }, count(resident.size_bytes / 1024),
      count(resident.hits), count(resident.value), count(resident.age_s),
      left(["pinned", "leaving"].filter((word) => resident[word]).join(" ")),
    ]),
    "Nothing: no block has been worth it so far.",
    residents.length > SHOWN ? `and ${residents.length - SHOWN} more` : "");
}

function worthText(worth) {
  const spared = worth.received_bytes
    ? ` Readers received ${bytes(worth.received_bytes)} from other nodes, of which homes sent ` +
      `${bytes(worth.home_sent_bytes)}: the switch spared their links ${bytes(worth.spared_bytes)}.`
    : "";
  $("worth").textContent = `Advice: ${worth.advice}. ${worth.why}.${spared}`;
}

function namespaces(status) {
  const limit = (value, unit) => value ? `${count(value)} ${unit}` : "–";
  fill($("namespaces"),
    ["number", left("tenant"), left("model"), left("version"), left("policy"), "weight",
      "operations/s", "MiB/s", "TTL s"],
    (status.namespaces || []).map((each) => [
      each.namespace, left(each.tenant), left(each.model), left(each.version),
      left(each.settings.policy || "the node's"), each.settings.weight,
      limit(each.settings.operations_per_s, ""), limit(each.settings.bytes_per_s / MIB, ""),
      limit(each.settings.ttl_s, ""),
    ]),
    "None yet: the first client makes one.");
}

function decisionTable(decisions) {
  const names = [...new Set(decisions.flatMap((each) => Object.keys(each)))];
  fill($("decisions"),
    names.map((name) => left(name.replaceAll("_", " "))),
    decisions.slice(0, SHOWN).map((each) => names.map((name) =>
      ({ text: each[name] ?? "", style: { key: "key", reason: "long" }[name] || "words" }))),
    "None yet.",
    decisions.length > SHOWN ? `and ${decisions.length - SHOWN} earlier ones` : "");
}

// --- the page -----------------------------------------------------------------------------------

$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", String(paused));
  $("pause").textContent = paused ? "Go on" : "Pause";
  clearTimeout(timer);
  if (!paused) round();
});

$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  token = $("token").value.trim();
  sessionStorage.setItem("kvcast-token", token);
  $("token").value = "";
  round();
});

round();
