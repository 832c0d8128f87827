// The second part of the page's script: a panel per task, the API key, and live numbers.

const POLL_MS = 2000;
const HISTORY = 60; // points of a sparkline
const SVG = "http://www.w3.org/2000/svg";

const find = (id) => document.getElementById(id);

// ------------------------------------------------------------------ the server

class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

const key = {
  value: "",
  read() {
    try { this.value = sessionStorage.getItem("api-key") ?? ""; } catch { /* storage is switched off */ }
  },
  write(value) {
    this.value = value;
    try { sessionStorage.setItem("api-key", value); } catch { /* this page remembers it */ }
  },
};

function errorSentence(response, body) {
  const places = [body?.error?.message, body?.error, body?.message, body?.detail];
  const said = places.find((text) => typeof text === "string" && text);
  const wait = Number(response.headers.get("retry-after"));
  return (said ?? `The server answered with status ${response.status}.`) + (wait ? ` Try again in ${wait} s.` : "");
}

async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (key.value) headers.Authorization = `Bearer ${key.value}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached.", 0);
  }
  const text = await response.text();
  let body;
  try { body = JSON.parse(text); } catch { body = null; }
  if (!response.ok) throw new ServerError(errorSentence(response, body), response.status);
  if (body === null) throw new ServerError(`The answer of ${path} is not JSON.`, response.status);
  return { body, headers: response.headers };
}

async function post({ path, body }, signal) {
  const start = performance.now();
  const headers = { "Content-Type": "application/json" };
  const answer = await ask(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  return { ...answer, path, elapsed: performance.now() - start };
}

const quote = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** The request as a command; a key is left to the shell's variable API_KEY. */
function curl({ path, body }) {
  const secret = key.value ? ' \\\n  -H "Authorization: Bearer $API_KEY"' : "";
  const address = quote(new URL(path, document.baseURI).href);
  return `curl ${address} -H 'Content-Type: application/json'${secret} \\\n  -d ${quote(JSON.stringify(body))}`;
}

// ------------------------------------------------------------------ tasks

/** By panel: the models to choose, by task; the requests for a form's values; what shows their answers. */
const PANELS = {
  embed: {
    models: { embed: "Model" },
    requests: ({ texts, prompt }, { embed }) => ({
      embed: { path: "v1/embed", body: { model: embed, inputs: lines(texts), ...(prompt && { prompt_name: prompt }) } },
    }),
    show: showSimilarities,
  },
  search: {
    models: { embed: "Embedding model", rerank: "Reranker" },
    requests({ query, texts }, { embed, rerank }) {
      const requests = {}, documents = lines(texts);
      if (embed) {
        requests.query = { path: "v1/embed", body: { model: embed, inputs: [query], prompt_name: "query" } };
        requests.documents = { path: "v1/embed", body: { model: embed, inputs: documents, prompt_name: "document" } };
      }
      if (rerank) requests.rerank = { path: "v1/rerank", body: { model: rerank, query, documents } };
      return requests;
    },
    show: showRanking,
  },
  classify: {
    models: { classify: "Model" },
    requests: ({ text, second }, { classify }) => ({
      classify: { path: "v1/classify", body: { model: classify, inputs: [second.trim() ? [text, second] : text] } },
    }),
    show: showClasses,
  },
  tag: {
    models: { tag: "Model" },
    requests: ({ text }, { tag }) => ({ tag: { path: "v1/tag", body: { model: tag, inputs: [text] } } }),
    show: showTags,
  },
  answer: {
    models: { answer: "Model" },
    requests: ({ question, context }, { answer }) => ({
      answer: { path: "v1/answer", body: { model: answer, inputs: [{ question, context }] } },
    }),
    show: showAnswer,
  },
  "fill-mask": {
    models: { "fill-mask": "Model" },
    requests: ({ text }, { "fill-mask": model }) => ({
      fill: { path: "v1/fill-mask", body: { model, inputs: [text] } },
    }),
    show: showFillings,
  },
  sparse: {
    models: { sparse: "Model" },
    requests: ({ text, role }, { sparse }) => ({
      sparse: { path: "v1/sparse", body: { model: sparse, inputs: [text], role } },
    }),
    show: showSparse,
  },
  multi: {
    models: { multi: "Model" },
    requests: ({ query, text }, { multi }) => ({
      query: { path: "v1/multi", body: { model: multi, inputs: [query], role: "query" } },
      document: { path: "v1/multi", body: { model: multi, inputs: [text], role: "document" } },
    }),
    show: showMaxSim,
  },
  tokenize: {
    models: { tokenize: "Model" },
    requests: ({ text }, { tokenize }) => ({
      tokenize: { path: "v1/tokenize", body: { model: tokenize, inputs: [text] } },
    }),
    show: showTokens,
  },
};

// ------------------------------------------------------------------ panels

/** One task: its form, its result, and what a click on its button does. */
class Panel {
  constructor(name, models) {
    this.name = name;
    this.section = find(`panel-${name}`);
    this.form = this.section.querySelector("form");
    const tasks = Object.entries(PANELS[name].models);
    this.choices = tasks.map(([task, label]) => this.choice(task, label, models)).filter(Boolean);
    const copy = make("button", { type: "button" }, "Copy as curl");
    this.form.append(make("div", { class: "actions" }, make("button", { class: "primary" }, "Run"), copy,
      make("span", { class: "hint" }, this.form.querySelector("input") ? "Enter or Ctrl+Enter" : "Ctrl+Enter")));
    this.status = make("p", { class: "status", role: "status" });
    this.error = make("p", { class: "error", role: "alert", hidden: true });
    this.out = make("div", { class: "out" });
    this.timing = make("ul", { class: "timing", "aria-label": "Timing of the last run" });
    this.section.append(make("div", { class: "result", role: "region", "aria-label": "Result" },
      this.status, this.error, this.out, this.timing));
    this.status.textContent = "Press Run to see the result.";
    this.form.addEventListener("submit", (event) => { event.preventDefault(); this.run(); });
    this.form.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
      event.preventDefault();
      this.form.requestSubmit();
    });
    copy.addEventListener("click", () => this.copy(copy));
  }

  choice(task, label, models) {
    const able = models.filter((model) => task === "tokenize" || model.tasks.includes(task));
    if (!able.length) return null;
    const id = `${this.name}-${task}-model`;
    const options = able.map(({ name }) => make("option", { value: name }, name));
    const select = make("select", { id, "data-task": task }, ...options);
    this.form.append(make("div", { hidden: able.length === 1 }, make("label", { for: id }, label), select));
    return select;
  }

  get chosen() {
    return Object.fromEntries(this.choices.map((select) => [select.dataset.task, select.value]));
  }

  get values() {
    const fields = [...this.form.elements].filter(({ name }) => name);
    return Object.fromEntries(fields.map(({ name, value }) => [name, value]));
  }

  get requests() {
    return PANELS[this.name].requests(this.values, this.chosen);
  }

  async run() {
    this.controller?.abort();
    const controller = (this.controller = new AbortController());
    const { requests, values, chosen } = this;
    this.status.textContent = "Running…";
    this.section.setAttribute("aria-busy", "true");
    try {
      const answers = await Promise.all(Object.values(requests).map((request) => post(request, controller.signal)));
      if (controller !== this.controller) return;
      const bodies = Object.fromEntries(Object.keys(requests).map((name, index) => [name, answers[index].body]));
      const shown = document.createDocumentFragment();
      this.status.textContent = PANELS[this.name].show(bodies, values, shown, chosen);
      this.out.replaceChildren(shown);
      this.timing.replaceChildren(...answers.map(timingLine));
      this.error.hidden = true;
      this.reveal();
    } catch (error) {
      if (controller !== this.controller) return;
      controller.abort();
      this.fail(error);
    }
    this.section.removeAttribute("aria-busy");
  }

  fail(error) {
    this.status.textContent = "";
    this.out.replaceChildren();
    this.timing.replaceChildren();
    const isServers = error instanceof ServerError;
    this.error.textContent = isServers ? error.message : `The page cannot show this answer: ${error.message}.`;
    this.error.hidden = false;
    this.reveal();
    if (error.status === 401) askForKey(() => this.run());
  }

  /** Scrolls to a result below the window, as on a phone. */
  reveal() {
    const result = this.status.parentElement;
    if (result.getBoundingClientRect().top > innerHeight - 80) result.scrollIntoView();
  }

  async copy(button) {
    const command = Object.values(this.requests).map(curl).join("\n");
    try {
      await navigator.clipboard.writeText(command);
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy as curl"; }, 1500);
    } catch { // browsers copy on https and localhost only
      this.out.replaceChildren(heading("Command"), make("pre", { tabindex: 0 }, command));
      this.status.textContent = "The browser does not allow the page to copy. Select the command below.";
    }
  }
}

function timingLine({ path, headers, elapsed }) {
  const parts = [make("b", {}, path), `round trip ${duration(elapsed)}`];
  for (const [name, label] of [["tokenization", "tokenizing"], ["queue", "queue"], ["inference", "inference"]]) {
    const value = headers.get(`x-${name}-time`);
    if (value !== null) parts.push(`${label} ${duration(value)}`);
  }
  const tokens = headers.get("x-compute-tokens");
  if (tokens !== null) parts.push(count(Number(tokens), "token"));
  return make("li", {}, ...parts.flatMap((part, index) => (index ? [" · ", part] : [part])));
}

function showPanels(models) {
  const served = new Set(["tokenize", ...models.flatMap((model) => model.tasks)]);
  const names = Object.keys(PANELS).filter((name) => Object.keys(PANELS[name].models).some((task) => served.has(task)));
  const panels = new Map(names.map((name) => [name, new Panel(name, models)]));
  const tabs = names.map((name) => {
    const controls = `panel-${name}`;
    return make("button", { role: "tab", id: `tab-${name}`, "aria-controls": controls }, find(controls).dataset.title);
  });
  const open = (name) => names.forEach((other, index) => {
    const { section } = panels.get(other), isOpen = other === name;
    section.hidden = !isOpen;
    tabs[index].setAttribute("aria-selected", isOpen);
    tabs[index].tabIndex = isOpen ? 0 : -1;
  });
  names.forEach((name, index) => {
    const { section } = panels.get(name);
    section.setAttribute("role", "tabpanel");
    section.setAttribute("aria-labelledby", tabs[index].id);
    tabs[index].addEventListener("click", () => {
      open(name);
      history.replaceState(null, "", `#${name}`);
    });
  });
  find("tabs").addEventListener("keydown", (event) => {
    const now = tabs.indexOf(document.activeElement), last = tabs.length - 1;
    const goals = { ArrowRight: now === last ? 0 : now + 1, ArrowLeft: now ? now - 1 : last, Home: 0, End: last };
    const next = goals[event.key];
    if (now < 0 || next === undefined) return;
    event.preventDefault();
    tabs[next].focus();
    tabs[next].click();
  });
  find("tabs").replaceChildren(...tabs);
  const openHash = () => panels.has(location.hash.slice(1)) && open(location.hash.slice(1));
  addEventListener("hashchange", openHash);
  open(names[0]);
  openHash();
  if (panels.has("embed")) showPrompts(panels.get("embed").choices[0], models);
  if (panels.has("fill-mask")) useMasks(panels.get("fill-mask").choices[0], models);
}

/** Offers the prompts of the chosen model. */
function showPrompts(select, models) {
  const update = () => {
    const prompts = Object.entries(models.find(({ name }) => name === select.value).prompts ?? {});
    const options = prompts.map(([name, text]) => make("option", { value: name }, text ? `${name}: “${text}”` : name));
    find("embed-prompt").replaceChildren(make("option", { value: "" }, "the model’s default"), ...options);
    find("prompt-field").hidden = !prompts.length;
  };
  select.parentElement.after(find("prompt-field"));
  select.addEventListener("change", update);
  update();
}

/** Writes the text with the chosen model's mask token. */
function useMasks(select, models) {
  const text = find("mask-text"), button = find("insert");
  let mask = "[MASK]";
  const update = () => {
    const next = models.find(({ name }) => name === select.value).mask_token ?? "[MASK]";
    text.value = text.value.replaceAll(mask, next);
    mask = next;
    button.textContent = `Insert ${mask}`;
  };
  select.addEventListener("change", update);
  button.addEventListener("click", () => {
    text.setRangeText(mask, text.selectionStart, text.selectionEnd, "end");
    text.focus();
  });
  update();
}

// ------------------------------------------------------------------ key, models, live numbers

let afterKey = null;

function askForKey(then) {
  afterKey = then;
  find("key").hidden = false;
  find("key-value").focus();
}

find("key").addEventListener("submit", (event) => {
  event.preventDefault();
  key.write(find("key-value").value);
  find("key").hidden = true;
  afterKey?.();
  poll();
});

async function start() {
  try {
    const { body } = await ask("info");
    if (!body.models?.length) throw new ServerError("The server does not list its models.", 200);
    const models = body.models.map((model) => ({ ...model, name: model.name ?? model.id, tasks: model.tasks ?? [] }));
    find("problem").hidden = true;
    showModels(models);
    showPanels(models);
    poll();
  } catch (error) {
    find("summary").textContent = "";
    find("problem").textContent = error.message;
    find("problem").hidden = false;
    if (error.status === 401) askForKey(start);
  }
  document.documentElement.dataset.drawn = "true";
}

function showModels(models) {
  const names = models.map(({ name }) => name);
  find("summary").textContent = names.length > 3 ? `${names.length} models` : names.join(", ");
  document.title = `${find("summary").textContent} – BertBlocks`;
  const number = (value) => (typeof value === "number" ? whole.format(value) : "–");
  const rows = models.map(({ name, tasks, precision, max_length: longest, parameters, labels }) => [
    name, tasks.join(", "), precision ?? "–", number(longest), number(parameters), labels?.join(", ") || "–"]);
  const columns = [["name", "word"], ["tasks", "word"], ["precision", "word"], ["longest text", "number"],
    ["parameters", "number"], ["labels", "text"]];
  find("models").querySelector("div").replaceWith(table("Models", columns, rows));
  find("models").hidden = false;
}

const STATS = {
  requests_per_second: ["requests/s"],
  tokens_per_second: ["tokens/s"],
  p50_ms: ["median latency", duration],
  p99_ms: ["99th percentile", duration],
  queue_tokens: ["tokens waiting"],
  batch_tokens: ["tokens per batch"],
};
const past = Object.fromEntries(Object.keys(STATS).map((name) => [name, []]));
let timer = null;

async function poll() {
  clearTimeout(timer);
  if (document.hidden) return;
  try {
    const { body } = await ask("stats");
    for (const name of Object.keys(STATS)) past[name] = [...past[name], body[name] ?? null].slice(-HISTORY);
    drawStats(body);
    find("live-state").textContent = "";
  } catch (error) {
    if (error.status === 401 || error.status === 404) return;
    find("live-state").textContent = error.message;
  }
  clearTimeout(timer);
  timer = setTimeout(poll, POLL_MS);
}

function drawStats(body) {
  const tiles = Object.entries(STATS).map(([name, [label, format = brief.format]]) => {
    const [value, unit] = (typeof body[name] === "number" ? format(body[name]) : "–").split(" ");
    const amount = make("dd", {}, value, ...(unit ? [make("small", {}, ` ${unit}`)] : []));
    return make("div", { class: "tile", "data-stat": name }, make("dt", {}, label), amount, sparkline(past[name]));
  });
  find("tiles").replaceChildren(...tiles);
  find("live").hidden = false;
}

function sparkline(values) {
  const svg = document.createElementNS(SVG, "svg"), line = document.createElementNS(SVG, "polyline");
  const top = Math.max(...values, 1e-9);
  const step = 100 / (Math.max(values.length, 10) - 1);
  const place = (value, index) => `${100 - step * (values.length - 1 - index)},${23 - 21 * (value ?? 0) / top}`;
  svg.setAttribute("viewBox", "0 0 100 24");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  line.setAttribute("points", values.map(place).join(" "));
  svg.append(line);
  return svg;
}

document.addEventListener("visibilitychange", poll);
key.read();
start();
