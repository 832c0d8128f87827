// Tries every loaded model by hand. Texts of users and of the server are only ever inserted as text.

const POLL_MS = 2000;
const HISTORY = 60; // points of a sparkline
const MOST = { sentences: 40, pairs: 8, rows: 200, bars: 30, tokens: 2000, queryTokens: 64, documentTokens: 160 };
const SVG = "http://www.w3.org/2000/svg";

const find = (id) => document.getElementById(id);
const lines = (text) => text.split("\n").map((line) => line.trim()).filter(Boolean);
const brief = new Intl.NumberFormat("en", { maximumSignificantDigits: 3, notation: "compact" });
const whole = new Intl.NumberFormat("en");
const count = (number, noun) => `${whole.format(number)} ${noun}${number === 1 ? "" : "s"}`;
const fixed = (number, digits = 2) => number.toFixed(digits).replace("-", "−");

/** An element with attributes and children; strings become text. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

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
  const said = [body?.error?.message, body?.error, body?.message, body?.detail].find((text) => typeof text === "string" && text);
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
  const options = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal };
  const answer = await ask(path, options);
  return { ...answer, path, elapsed: performance.now() - start };
}

const quote = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** The request as a command; a key is left to the shell's variable API_KEY. */
function curl({ path, body }) {
  const secret = key.value ? ' \\\n  -H "Authorization: Bearer $API_KEY"' : "";
  const address = quote(new URL(path, document.baseURI).href);
  return `curl ${address} -H 'Content-Type: application/json'${secret} \\\n  -d ${quote(JSON.stringify(body))}`;
}

// ------------------------------------------------------------------ parts of results

function region(name, ...children) {
  return make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": name }, ...children);
}

function table(name, heads, rows) {
  const cells = (row) => row.map((cell) => {
    const isNumber = typeof cell === "number" || /^[−\d][\d.,]*$/.test(cell);
    return cell instanceof Node ? make("td", {}, cell) : make("td", { class: isNumber && "number", dir: "auto" }, String(cell));
  });
  const head = make("thead", {}, make("tr", {}, ...heads.map((text) => make("th", { scope: "col" }, text))));
  const body = make("tbody", {}, ...rows.slice(0, MOST.rows).map((row) => make("tr", {}, ...cells(row))));
  return region(name, make("table", {}, make("caption", {}, name), head, body));
}

/** Rows of [label, value, is chosen] as bars, whose whole width is `full`. */
function bars(name, rows, full, digits = 3) {
  const made = rows.map(([label, value, isChosen]) => {
    const bar = make("span", { class: "bar", "aria-hidden": "true" });
    bar.style.setProperty("--share", Math.min(1, Math.abs(value) / full || 0));
    const head = make("th", { scope: "row", dir: "auto" }, label);
    if (isChosen) head.append(make("span", { class: "chosen" }, "predicted"));
    return make("tr", {}, head, make("td", { class: "track" }, bar), make("td", { class: "number" }, fixed(value, digits)));
  });
  return make("table", { class: "bars" }, make("caption", {}, name), make("tbody", {}, ...made));
}

/** Numbers of every row and column, coloured between `low` and `high`. */
function heatMap(name, rows, columns, value, low, high, kind) {
  const heads = columns.map(({ short, text }) => make("th", { scope: "col", title: text, dir: "auto" }, short ?? text));
  const body = rows.map(({ short, text }, row) => {
    const cells = columns.map((_, column) => {
      const cell = make("td", { class: kind(row, column) }, fixed(value(row, column)));
      const share = high > low ? (value(row, column) - low) / (high - low) : 0;
      cell.style.setProperty("--heat", `${100 * Math.max(0, Math.min(1, share))}%`);
      return cell;
    });
    const number = short === undefined ? [] : [make("b", {}, `${short} `)];
    return make("tr", {}, make("th", { scope: "row", title: text }, ...number, make("bdi", {}, text)), ...cells);
  });
  const head = make("thead", {}, make("tr", {}, make("td"), ...heads));
  return region(name, make("table", { class: "heat" }, make("caption", {}, name), head, make("tbody", {}, ...body)));
}

/** A text with spans marked and named. Offsets count code points, as Python's do. */
function markSpans(text, spans) {
  const characters = Array.from(text);
  const slice = (start, end) => characters.slice(start, end).join("");
  const passage = make("p", { class: "passage", dir: "auto" });
  let position = 0;
  for (const { start, end, label, color } of [...spans].sort((a, b) => a.start - b.start)) {
    if (start < position || end <= start) continue;
    const mark = make("mark", { class: `c${color}` }, make("bdi", {}, slice(start, end)));
    if (label) mark.append(make("span", { class: "label" }, label));
    passage.append(slice(position, start), mark);
    position = end;
  }
  passage.append(slice(position));
  return passage;
}

const note = (text) => make("p", { class: "hint" }, text);
const heading = (text, small) => make("h3", {}, text, ...(small ? [" ", make("small", {}, small)] : []));

function cosine(a, b) {
  let product = 0, first = 0, second = 0;
  for (let i = 0; i < a.length; i++) {
    product += a[i] * b[i];
    first += a[i] * a[i];
    second += b[i] * b[i];
  }
  return product / (Math.sqrt(first * second) || 1);
}

// ------------------------------------------------------------------ tasks: each fills `out` and returns a sentence

function showSimilarities({ embed }, { texts }, out) {
  const sentences = lines(texts).map((text, index) => ({ short: index + 1, text }));
  const vectors = embed.results;
  const pairs = [];
  for (let i = 0; i < vectors.length; i++) {
    for (let j = 0; j < i; j++) pairs.push({ a: j, b: i, score: cosine(vectors[i], vectors[j]) });
  }
  pairs.sort((one, other) => other.score - one.score);
  const shown = sentences.slice(0, MOST.sentences);
  const value = (row, column) => cosine(vectors[row], vectors[column]);
  const kind = (row, column) => row === column && "self";
  out.append(heatMap("Cosine similarity", shown, shown, value, pairs.at(-1)?.score ?? 0, pairs[0]?.score ?? 1, kind));
  if (shown.length < sentences.length) out.append(note(`The map shows the first ${shown.length} of ${count(sentences.length, "sentence")}.`));
  if (!pairs.length) return "Add a second sentence to compare.";
  const rows = pairs.slice(0, MOST.pairs).map(({ a, b, score }) => [fixed(score, 3), sentences[a].text, sentences[b].text]);
  out.append(table("Nearest pairs", ["cosine", "sentence", "sentence"], rows));
  const { a, b, score } = pairs[0];
  return `${count(sentences.length, "sentence")} of ${count(vectors[0].length, "dimension")}. Nearest: ${a + 1} and ${b + 1}, ${fixed(score, 3)}.`;
}

function showRanking({ query, documents, rerank }, { texts }, out, chosen) {
  const all = lines(texts);
  const sorted = (scores) => scores.map((score, index) => ({ score, index })).sort((a, b) => b.score - a.score);
  const column = (title, model, ranking, before) => {
    const items = ranking.map(({ score, index }, rank) => {
      const item = make("li", {}, make("bdi", {}, all[index]), make("span", { class: "score" }, fixed(score, 3)));
      if (before) item.append(move(before.findIndex((other) => other.index === index) - rank));
      return item;
    });
    return make("div", {}, heading(title, model), make("ol", {}, ...items));
  };
  const columns = make("div", { class: "columns" });
  let first, second;
  if (documents) {
    first = sorted(documents.results.map((vector) => cosine(query.results[0], vector)));
    columns.append(column("By embeddings", chosen.embed, first));
  }
  if (rerank) {
    second = rerank.results.map(({ index, relevance_score: score }) => ({ index, score })).sort((a, b) => b.score - a.score);
    columns.append(column("Reranked", chosen.rerank, second, first));
  }
  out.append(columns);
  const best = (second ?? first)[0];
  const moved = first && second ? `, ${first[0].index === best.index ? "with and without" : "after"} reranking` : "";
  return `${count(all.length, "document")}. Best${moved}: ${all[best.index]}`;
}

function move(places) {
  if (!places) return make("span", { class: "move", role: "img", "aria-label": "same place" }, "=");
  const [arrow, word] = places > 0 ? ["▲", "up"] : ["▼", "down"];
  return make("span", { class: `move ${word}`, role: "img", "aria-label": `${word} ${Math.abs(places)}` }, `${arrow} ${Math.abs(places)}`);
}

function showClasses({ classify }, values, out) {
  const { labels = [], scores } = classify.results[0];
  const rows = Object.entries(scores).sort((a, b) => b[1] - a[1]);
  const largest = Math.max(1, ...rows.map(([, score]) => Math.abs(score)));
  const shown = rows.slice(0, MOST.bars).map(([label, score]) => [label, score, labels.includes(label)]);
  out.append(bars("Scores", shown, largest));
  if (shown.length < rows.length) out.append(note(`The ${shown.length} best of ${count(rows.length, "label")}.`));
  if (labels.length) return `Predicted: ${labels.join(", ")}.`;
  return rows.length === 1 ? `Predicted number: ${fixed(rows[0][1], 3)}.` : "No label reaches the threshold.";
}

function showTags({ tag }, { text }, out) {
  const found = tag.results[0];
  const kinds = [...new Set(found.map(({ label }) => label))];
  out.append(markSpans(text, found.map((span) => ({ ...span, color: kinds.indexOf(span.label) % 7 }))));
  if (!found.length) return "The model finds nothing in this text.";
  out.append(table("Spans", ["label", "text", "characters", "score"], found.map((span) => [span.label, span.text, `${span.start}–${span.end}`, fixed(span.score, 3)])));
  if (found.length > MOST.rows) out.append(note(`The table shows the first ${MOST.rows} of ${count(found.length, "span")}.`));
  return `${count(found.length, "span")} with ${count(kinds.length, "label")}: ${kinds.join(", ")}.`;
}

function showAnswer({ answer }, { context }, out) {
  const { text, start, end, best = [], no_answer_score: none } = answer.results[0];
  out.append(markSpans(context, text ? [{ start, end, label: "answer", color: 2 }] : []));
  const rows = best.map((candidate, index) => [index + 1, candidate.text, `${candidate.start}–${candidate.end}`, fixed(candidate.score)]);
  out.append(table("Candidates", ["rank", "answer", "characters", "score"], rows));
  if (typeof none === "number") out.append(note(`Score of “no answer”: ${fixed(none)}.`));
  return text ? `Answer: ${text}` : "The context does not have an answer.";
}

function showFillings({ fill }, { text }, out) {
  const masks = fill.results[0];
  const columns = masks.map((candidates, index) =>
    bars(masks.length > 1 ? `Mask ${index + 1} of ${masks.length}` : "The mask", candidates.map(({ token, score }) => [token, score]), 1));
  out.append(make("div", { class: "columns" }, ...columns));
  return `Most probable: ${masks.map((candidates) => candidates[0]?.token).join(", ")}.`;
}

function showSparse({ sparse }, values, out) {
  const { indices, values: weights, tokens = indices.map(String) } = sparse.results[0];
  const rows = tokens.map((token, index) => [token, weights[index]]).sort((a, b) => b[1] - a[1]).slice(0, MOST.bars);
  out.append(bars(`The ${rows.length} largest weights`, rows, rows[0]?.[1] ?? 1));
  return `${count(indices.length, "token")} of the vocabulary ${indices.length === 1 ? "has" : "have"} a weight.`;
}

function showMaxSim({ query, document: text }, values, out) {
  const rows = query.results[0], columns = text.results[0];
  const dot = (a, b) => a.reduce((sum, number, index) => sum + number * b[index], 0);
  const scores = rows.map((row) => columns.map((column) => dot(row, column)));
  const best = scores.map((row) => row.reduce((top, score, index) => (score > row[top] ? index : top), 0));
  const total = scores.reduce((sum, row, index) => sum + (row[best[index]] ?? 0), 0);
  const names = (answer, most) => answer.results[0].slice(0, most).map((_, index) =>
    answer.tokens ? { text: answer.tokens[0][index] } : { short: index + 1, text: "" });
  const flat = scores.flat();
  const [low, high] = flat.reduce(([least, most], score) => [Math.min(least, score), Math.max(most, score)], [1, -1]);
  const kind = (row, column) => best[row] === column && "best";
  out.append(heatMap("Query tokens (rows) and document tokens (columns)", names(query, MOST.queryTokens),
    names(text, MOST.documentTokens), (row, column) => scores[row][column], low, high, kind));
  out.append(note("The best match of each query token has a frame."));
  if (rows.length > MOST.queryTokens || columns.length > MOST.documentTokens) {
    out.append(note(`The map shows at most ${MOST.queryTokens} rows and ${MOST.documentTokens} columns.`));
  }
  return `MaxSim: ${fixed(total)}, from ${count(rows.length, "query token")} and ${count(columns.length, "document token")}.`;
}

function showTokens({ tokenize }, { text }, out) {
  const tokens = tokenize.results[0];
  const items = tokens.slice(0, MOST.tokens).map(({ id, token, start, end, special }) => {
    const title = special ? "special token" : `characters ${start} to ${end}`;
    return make("li", { class: special && "special", title }, make("bdi", {}, token), make("small", {}, String(id)));
  });
  out.append(make("ol", { class: "tokens", "aria-label": "Tokens with their ids" }, ...items));
  if (items.length < tokens.length) out.append(note(`The first ${whole.format(items.length)} of ${count(tokens.length, "token")}.`));
  const special = tokens.filter((token) => token.special).length;
  return `${count(tokens.length, "token")}, ${special} of them special (dashed), for ${count(Array.from(text).length, "character")}.`;
}

/** By panel: the models to choose, by task; the requests for the form's values and chosen models; what shows the answers. */
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
    requests: ({ text }, chosen) => ({ fill: { path: "v1/fill-mask", body: { model: chosen["fill-mask"], inputs: [text] } } }),
    show: showFillings,
  },
  sparse: {
    models: { sparse: "Model" },
    requests: ({ text, role }, { sparse }) => ({ sparse: { path: "v1/sparse", body: { model: sparse, inputs: [text], role } } }),
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
    requests: ({ text }, { tokenize }) => ({ tokenize: { path: "v1/tokenize", body: { model: tokenize, inputs: [text] } } }),
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
    this.choices = Object.entries(PANELS[name].models).map(([task, label]) => this.choice(task, label, models)).filter(Boolean);
    const copy = make("button", { type: "button" }, "Copy as curl");
    this.form.append(make("div", { class: "actions" }, make("button", { class: "primary" }, "Run"), copy,
      make("span", { class: "hint" }, this.form.querySelector("input") ? "Enter or Ctrl+Enter" : "Ctrl+Enter")));
    this.status = make("p", { class: "status", role: "status" });
    this.error = make("p", { class: "error", role: "alert", hidden: true });
    this.out = make("div", { class: "out" });
    this.timing = make("ul", { class: "timing", "aria-label": "Timing of the last run" });
    const result = make("div", { class: "result", role: "region", "aria-label": `${this.section.dataset.title}: result` },
      this.status, this.error, this.out, this.timing);
    this.section.append(result);
    this.status.textContent = "Press Run to see the result.";
    this.form.addEventListener("submit", (event) => { event.preventDefault(); this.run(); });
    this.form.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); this.form.requestSubmit(); }
    });
    copy.addEventListener("click", () => this.copy(copy));
  }

  choice(task, label, models) {
    const able = models.filter((model) => task === "tokenize" || model.tasks.includes(task));
    if (!able.length) return null;
    const id = `${this.name}-${task}-model`;
    const select = make("select", { id, "data-task": task }, ...able.map(({ name }) => make("option", { value: name }, name)));
    this.form.append(make("div", { class: "field", hidden: able.length === 1 }, make("label", { for: id }, label), select));
    return select;
  }

  get chosen() {
    return Object.fromEntries(this.choices.map((select) => [select.dataset.task, select.value]));
  }

  get values() {
    return Object.fromEntries(new FormData(this.form));
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
    this.error.textContent = error instanceof ServerError ? error.message : `The page cannot show this answer: ${error.message}`;
    this.error.hidden = false;
    if (error.status === 401) askForKey(() => this.run());
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
  const parts = [make("b", {}, path), `${brief.format(elapsed)} ms there and back`];
  for (const [name, label] of [["tokenization", "tokenizing"], ["queue", "queue"], ["inference", "inference"]]) {
    const value = headers.get(`x-${name}-time`);
    if (value !== null) parts.push(`${label} ${brief.format(value)} ms`);
  }
  const tokens = headers.get("x-compute-tokens");
  if (tokens !== null) parts.push(count(Number(tokens), "token"));
  return make("li", {}, ...parts.flatMap((part, index) => (index ? [" · ", part] : [part])));
}

function showPanels(models) {
  const served = new Set(["tokenize", ...models.flatMap((model) => model.tasks)]);
  const names = Object.keys(PANELS).filter((name) => Object.keys(PANELS[name].models).some((task) => served.has(task)));
  const panels = new Map(names.map((name) => [name, new Panel(name, models)]));
  const tabs = names.map((name) => make("button", { role: "tab", id: `tab-${name}`, "aria-controls": `panel-${name}` }, find(`panel-${name}`).dataset.title));
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
    tabs[index].addEventListener("click", () => { open(name); history.replaceState(null, "", `#${name}`); });
  });
  find("tabs").addEventListener("keydown", (event) => {
    const now = tabs.indexOf(document.activeElement), last = tabs.length - 1;
    const next = { ArrowRight: now === last ? 0 : now + 1, ArrowLeft: now ? now - 1 : last, Home: 0, End: last }[event.key];
    if (now < 0 || next === undefined) return;
    event.preventDefault();
    tabs[next].focus();
    tabs[next].click();
  });
  find("tabs").replaceChildren(...tabs);
  const openHash = () => { const name = location.hash.slice(1); if (panels.has(name)) open(name); };
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
    if (!Array.isArray(body.models) || !body.models.length) throw new ServerError("The server does not list its models.", 200);
    const models = body.models.map((model) => ({ ...model, tasks: model.tasks ?? [] }));
    find("problem").hidden = true;
    find("docs").hidden = body.docs === false;
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
  const rows = models.map((model) => [model.name, model.tasks.join(", "), model.precision ?? "–", number(model.max_length),
    typeof model.parameters === "number" ? brief.format(model.parameters) : "–", model.labels?.length ? Object.values(model.labels).join(", ") : "–"]);
  const heads = ["name", "tasks", "precision", "longest text", "parameters", "labels"];
  find("models").querySelector("div").replaceWith(table("Models", heads, rows));
  find("models").hidden = false;
}

const STATS = {
  requests_per_second: ["requests/s"],
  tokens_per_second: ["tokens/s"],
  p50_ms: ["median latency", "ms"],
  p99_ms: ["99th percentile", "ms"],
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
  const tiles = Object.entries(STATS).map(([name, [label, unit = ""]]) => {
    const value = typeof body[name] === "number" ? brief.format(body[name]) : "–";
    const amount = make("dd", {}, value, ...(unit && value !== "–" ? [make("small", {}, ` ${unit}`)] : []));
    return make("div", { class: "tile", "data-stat": name }, make("dt", {}, label), amount, sparkline(past[name]));
  });
  find("tiles").replaceChildren(...tiles);
  find("live").hidden = false;
}

function sparkline(values) {
  const svg = document.createElementNS(SVG, "svg"), line = document.createElementNS(SVG, "polyline");
  const top = Math.max(...values, 1e-9);
  const place = (value, index) => `${100 - 100 * (values.length - 1 - index) / (HISTORY - 1)},${22 - 20 * (value ?? 0) / top}`;
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
