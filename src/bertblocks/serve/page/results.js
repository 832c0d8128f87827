// The first part of the page's script. How answers look: tables, bars, heat maps and marked texts, and a function per
// task. Texts of users and of the server are only ever inserted as text.

/** How much of a long answer is shown. */
const MOST = { sentences: 40, pairs: 8, rows: 200, bars: 30, tokens: 2000, queryTokens: 64, documentTokens: 160 };

const lines = (text) => text.split("\n").map((line) => line.trim()).filter(Boolean);
const brief = new Intl.NumberFormat("en", { maximumSignificantDigits: 3, notation: "compact" });
const duration = (ms) => (ms < 1000 ? `${brief.format(ms)} ms` : `${brief.format(ms / 1000)} s`);
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

// ------------------------------------------------------------------ parts of results

function region(name, ...children) {
  return make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": name }, ...children);
}

/** A table whose columns are [title, kind]; the kind is "text", "word" or "number". */
function table(name, columns, rows) {
  const row = (tag, cells) => make("tr", {}, ...cells.map((cell, index) =>
    make(tag, { class: columns[index][1], scope: tag === "th" && "col" }, make("bdi", {}, String(cell)))));
  const head = make("thead", {}, row("th", columns.map(([title]) => title)));
  const body = make("tbody", {}, ...rows.slice(0, MOST.rows).map((cells) => row("td", cells)));
  return region(name, make("table", {}, make("caption", {}, name), head, body));
}

/** Rows of [label, value, is chosen] as bars, whose whole width is `full`. */
function bars(name, rows, full, digits = 3) {
  const made = rows.map(([label, value, isChosen]) => {
    const bar = make("span", { class: "bar", "aria-hidden": "true" });
    bar.style.setProperty("--share", Math.min(1, Math.abs(value) / full || 0));
    const head = make("th", { scope: "row" }, make("bdi", {}, label.trim() ? label : "(blank)"));
    if (isChosen) head.append(" ", make("span", { class: "chosen" }, "predicted"));
    const number = make("td", { class: "number" }, fixed(value, digits));
    return make("tr", {}, head, make("td", { class: "track" }, bar), number);
  });
  return make("table", { class: "bars" }, make("caption", {}, name), make("tbody", {}, ...made));
}

/** Numbers of every row and column, coloured between `low` and `high`. */
function heatMap(name, rows, columns, value, low, high, kind) {
  const heads = columns.map(({ short, text }) =>
    make("th", { scope: "col", title: text, class: !short && "upright" }, make("bdi", {}, String(short ?? text))));
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
  const passage = make("p", { class: "passage", dir: "auto", tabindex: 0 });
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
  const best = ({ a, b, score }) => [fixed(score, 3), sentences[a].text, sentences[b].text];
  for (let i = 0; i < vectors.length; i++) {
    for (let j = 0; j < i; j++) pairs.push({ a: j, b: i, score: cosine(vectors[i], vectors[j]) });
  }
  pairs.sort((one, other) => other.score - one.score);
  const shown = sentences.slice(0, MOST.sentences);
  const value = (row, column) => cosine(vectors[row], vectors[column]);
  const kind = (row, column) => row === column && "self";
  const low = pairs.at(-1)?.score ?? 0, high = pairs[0]?.score ?? 1;
  out.append(heatMap("Cosine similarity", shown, shown, value, low, high, kind));
  if (shown.length < sentences.length) {
    out.append(note(`The map shows the first ${shown.length} of ${count(sentences.length, "sentence")}.`));
  }
  if (!pairs.length) return "Add a second sentence to compare.";
  const columns = [["cosine", "number"], ["sentence", "text"], ["sentence", "text"]];
  out.append(table("Nearest pairs", columns, pairs.slice(0, MOST.pairs).map(best)));
  const nearest = `Nearest: ${pairs[0].a + 1} and ${pairs[0].b + 1}, ${fixed(high, 3)}.`;
  return `${count(sentences.length, "sentence")} in ${count(vectors[0].length, "dimension")}. ${nearest}`;
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
    second = rerank.results.map(({ index, relevance_score: score }) => ({ index, score }));
    second.sort((a, b) => b.score - a.score);
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
  const by = Math.abs(places);
  return make("span", { class: `move ${word}`, role: "img", "aria-label": `${word} ${by}` }, `${arrow} ${by}`);
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
  const columns = [["label", "word"], ["text", "text"], ["characters", "number"], ["score", "number"]];
  const rows = found.map(({ label, text: said, start, end, score }) => [label, said, `${start}–${end}`, fixed(score, 3)]);
  out.append(table("Spans", columns, rows));
  if (rows.length > MOST.rows) out.append(note(`The first ${MOST.rows} of ${count(rows.length, "span")}.`));
  return `${count(found.length, "span")} with ${count(kinds.length, "label")}: ${kinds.join(", ")}.`;
}

function showAnswer({ answer }, { context }, out) {
  const { text, start, end, best = [], no_answer_score: none } = answer.results[0];
  out.append(markSpans(context, text ? [{ start, end, label: "answer", color: 2 }] : []));
  const columns = [["rank", "word"], ["answer", "text"], ["characters", "number"], ["score", "number"]];
  const rows = best.map((other, index) => [index + 1, other.text, `${other.start}–${other.end}`, fixed(other.score)]);
  if (rows.length) out.append(table("Candidates", columns, rows));
  if (typeof none === "number") out.append(note(`Score of “no answer”: ${fixed(none)}.`));
  return text ? `Answer: ${text}` : "The context does not have an answer.";
}

function showFillings({ fill }, values, out) {
  const masks = fill.results[0];
  const columns = masks.map((candidates, index) => {
    const name = masks.length > 1 ? `Mask ${index + 1} of ${masks.length}` : "Candidates";
    return bars(name, candidates.map(({ token, score }) => [token, score]), 1);
  });
  out.append(make("div", { class: "columns" }, ...columns));
  return `Most probable: ${masks.map((candidates) => candidates[0]?.token.trim() || "(blank)").join(", ")}.`;
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
  const names = ({ results: [vectors], tokens }, most) => vectors.slice(0, most).map((_, index) =>
    tokens?.[0].length === vectors.length ? { text: tokens[0][index] } : { short: index + 1, text: "" });
  const low = Math.min(...scores.map((row) => Math.min(...row))), high = Math.max(...scores.map((row) => Math.max(...row)));
  const kind = (row, column) => best[row] === column && "best";
  out.append(heatMap("Similarity of tokens", names(query, MOST.queryTokens),
    names(text, MOST.documentTokens), (row, column) => scores[row][column], low, high, kind));
  out.append(note("Rows are tokens of the query, columns tokens of the document. A frame marks the best of a row."));
  if (rows.length > MOST.queryTokens || columns.length > MOST.documentTokens) {
    out.append(note(`The map shows at most ${MOST.queryTokens} rows and ${MOST.documentTokens} columns.`));
  }
  return `MaxSim: ${fixed(total)}, of ${count(rows.length, "token")} in ${count(columns.length, "token")}.`;
}

function showTokens({ tokenize }, { text }, out) {
  const tokens = tokenize.results[0];
  const items = tokens.slice(0, MOST.tokens).map(({ id, token, start, end, special }) => {
    const title = special ? "special token" : start != null && `characters ${start} to ${end}`;
    return make("li", { class: special && "special", title }, make("bdi", {}, token), make("small", {}, String(id)));
  });
  out.append(make("ol", { class: "tokens", "aria-label": "Tokens with their ids" }, ...items));
  if (items.length < tokens.length) {
    out.append(note(`The first ${whole.format(items.length)} of ${count(tokens.length, "token")}.`));
  }
  const special = tokens.filter((token) => token.special).length;
  const characters = count(Array.from(text).length, "character");
  return `${count(tokens.length, "token")}, ${special} of them special (dashed), for ${characters}.`;
}
