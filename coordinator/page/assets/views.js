// What each address of the page shows. A view builds its elements once and fills them with every answer. Texts of jobs
// and nodes are anybody's: they go in as text alone. `get` asks the coordinator; `again` has the view refreshed at once.

import {areaChart, el, heatMap, lineChart, short} from "./charts.js";

const TERMINAL = ["CANCELLED", "SUCCEEDED", "FAILED"];
const PHASES = ["data", "index", "attention_forward", "attention_backward", "linear", "exposed_communication", "exposed_exchange",
                "exposed_offload", "optimizer", "checkpoint", "evaluation"];
const PAGE = 50;
const MOST_LOG_LINES = 2000;

// protobuf's JSON leaves out zeros and writes large integers as text.
const number = (value) => value === undefined ? 0 : Number(value);
const id = (name) => (name ?? "").replace(/^[a-z]+\//, "");
const list = (value) => value ?? [];
const words = (text) => text.toLowerCase().replaceAll("_", " ");
const percent = (value) => `${(100 * value).toFixed(value < 0.1 ? 2 : 1)}\u00a0%`;
const fixed = (digits) => (value) => Number.isFinite(value) ? value.toFixed(digits) : "not a number";
const exact = new Intl.NumberFormat("en");

function span(seconds) {
  if (!Number.isFinite(seconds) || seconds < 0) return "";
  if (seconds === 0) return "0 s";
  const units = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const first = units.findIndex(([, size]) => seconds >= size);
  if (first < 0) return `${(seconds * 1000).toFixed(0)} ms`;
  if (first === 3) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  const [unit, size] = units[first], [next, smaller] = units[first + 1];
  const rest = Math.floor(seconds % size / smaller);
  return `${Math.floor(seconds / size)} ${unit}${rest ? ` ${rest} ${next}` : ""}`;
}
const age = (time) => time ? `${span((Date.now() - Date.parse(time)) / 1000)} ago` : "";

function when(time) {
  return time ? el("time", {datetime: time}, new Date(time).toLocaleString("sv")) : "";
}

function badge(state) {
  const kind = {RUNNING: "good", SUCCEEDED: "good", READY: "good", COMPLETED: "good", FAILED: "bad", UNKNOWN: "bad",
                UNREACHABLE: "bad", LOST: "bad", FENCED: "bad", RETRYING: "warn", PENDING: "warn", STARTING: "warn",
                DRAINING: "warn", DRAINED: "warn"}[state] ?? "";
  return el("span", {class: `badge ${kind}`}, state ?? "UNKNOWN");
}

function table(label, columns, rows) {
  const head = el("tr", {}, ...columns.map(([name, kind]) => el("th", {scope: "col", class: kind}, name)));
  const body = rows.map((cells) =>
    el("tr", {}, ...cells.map((cell, i) => el("td", {class: columns[i][1]}, ...[cell].flat()))));
  return el("div", {class: "scroll"},
            el("table", {"aria-label": label}, el("thead", {}, head), el("tbody", {}, ...body)));
}

function card(title, ...children) {
  return el("section", {class: "card", "aria-label": title}, el("h2", {}, title), ...children);
}

function pairs(entries) {
  return el("dl", {class: "pairs"}, ...entries.filter(([, value]) => value !== "" && value !== undefined)
    .flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

const link = (job) => el("a", {class: "name", href: `#/jobs/${encodeURIComponent(id(job))}`}, id(job));

function progressOf(job) {
  const progress = job.progress ?? {};
  const step = number(progress.step), total = number(progress.total_steps) || number(job.spec?.training?.steps);
  const filled = el("span");
  filled.style.width = `${total ? Math.min(100, 100 * step / total) : 0}%`;
  return [`${exact.format(step)} / ${exact.format(total)}`,
          el("span", {class: "bar", role: "progressbar", "aria-valuemin": 0, "aria-valuemax": total, "aria-valuenow": step,
                      "aria-label": `steps of ${id(job.name)}`}, filled)];
}

// --- Jobs.

export function jobsView(get, again) {
  const states = ["PENDING", "STARTING", "RUNNING", "UNKNOWN", "RETRYING", "PAUSING", "PAUSED", "CANCELLING", ...TERMINAL];
  const state = el("select", {}, el("option", {value: ""}, "all"),
                   ...states.map((name) => el("option", {value: name}, words(name))));
  const filter = el("input", {type: "search", placeholder: "name=a-job AND labels.team=ocean", spellcheck: "false",
                              autocomplete: "off"});
  const newest = el("button", {type: "button"}, "Newest");
  const older = el("button", {type: "button"}, "Older");
  const count = el("span");
  const wrong = el("p", {class: "error", role: "alert", hidden: true});
  const queue = el("div"), rows = el("div");
  let token = "", next = "";

  const chosen = () => [state.value && `state=${state.value}`, filter.value.trim()].filter(Boolean).join(" AND ");
  async function refresh() {
    const asked = {filter: chosen(), page_token: token};
    const [waiting, retrying, page] = await Promise.all([
      get("/api/jobs", {filter: "state=PENDING", page_size: PAGE}), get("/api/jobs", {filter: "state=RETRYING", page_size: PAGE}),
      get("/api/jobs", {...asked, page_size: PAGE}).catch((error) => {
        if (error.status !== 400) throw error;
        return {error: error.message};
      })]);
    const waits = [...list(waiting.jobs).reverse(), ...list(retrying.jobs)];
    const all = number(waiting.total_size) + number(retrying.total_size);
    queue.replaceChildren(...(waits.length === 0 ? [] : [card(
      `Waiting: ${exact.format(all)}`,
      table("Jobs that wait", [["Job", ""], ["Why", "text"], ["Since", "number wide-only"]],
            waits.slice(0, 10).map((job) => [link(job.name), job.state_reason ?? "", age(job.create_time)])),
      all > 10 ? el("p", {class: "empty"}, `and ${exact.format(all - 10)} more: choose the state “pending” below`) : "")]));
    wrong.hidden = page.error === undefined;
    wrong.textContent = page.error ?? "";
    if (page.error !== undefined) return;
    const jobs = list(page.jobs);
    next = page.next_page_token ?? "";
    newest.disabled = token === "";
    older.disabled = next === "";
    count.textContent = `${exact.format(number(page.total_size))} jobs`;
    rows.replaceChildren(jobs.length === 0 ? el("p", {class: "empty"}, "No such jobs.") : table(
      "Jobs", [["Job", ""], ["State", "wide-only"], ["Steps", "number"], ["Loss", "number wide-only"],
               ["Tokens/s", "number wide-only"], ["Time left", "number wide-only"], ["Created", "number wide-only"]],
      jobs.map((job) => {
        const progress = job.progress ?? {};
        const runs = job.state === "RUNNING";
        const speed = runs && number(progress.tokens_per_second) ? short(number(progress.tokens_per_second)) : "";
        const loss = number(progress.step) ? fixed(4)(number(progress.loss)) : "";
        const figures = [loss && `loss\u00a0${loss}`, speed && `${speed}\u00a0tokens/s`].filter(Boolean).join(", ");
        return [[link(job.name), el("span", {class: "more muted"}, badge(job.state), " ", figures)],
                badge(job.state), progressOf(job), loss, speed,
                runs ? span(number(progress.eta_seconds)) : "", age(job.create_time)];
      })));
  }

  const begin = () => {
    token = "";
    again();
  };
  state.addEventListener("change", begin);
  filter.addEventListener("change", begin);
  newest.addEventListener("click", begin);
  older.addEventListener("click", () => {
    token = next;
    again();
  });
  return {
    title: "Jobs", refresh, elements: [
      el("h1", {class: "head"}, "Jobs"), queue,
      el("section", {class: "card", "aria-label": "All jobs"},
         el("div", {class: "controls"}, el("label", {}, "State", state), el("label", {class: "wide"}, "Filter", filter)),
         wrong, rows, el("p", {class: "pager"}, newest, older, count))]};
}

// --- Nodes.

export function nodesView(get, again) {
  const rows = el("div");
  const older = el("button", {type: "button"}, "Next"), first = el("button", {type: "button"}, "First");
  let token = "", next = "";
  async function refresh() {
    const page = await get("/api/nodes", {page_token: token, page_size: PAGE});
    next = page.next_page_token ?? "";
    first.disabled = token === "";
    older.disabled = next === "";
    const nodes = list(page.nodes);
    rows.replaceChildren(nodes.length === 0 ? el("p", {class: "empty"}, "No worker has connected yet.") : table(
      "Nodes", [["Node", ""], ["State", "wide-only"], ["Trainers", "number"], ["Devices", "wide-only"], ["Memory", "number wide-only"],
                ["Heard", "number wide-only"], ["Jobs", "wide-only"]],
      nodes.map((node) => {
        const inventory = node.inventory ?? {}, gpus = list(inventory.gpus);
        const devices = gpus.length ? `${gpus.length} × ${gpus[0].model || "GPU"}` : `${number(inventory.cpu_cores)} cores`;
        const jobs = list(node.jobs).flatMap((job, i) => [i ? ", " : "", link(job)]);
        return [[el("span", {class: "name"}, id(node.name)), el("span", {class: "more muted"}, badge(node.state), " ", devices),
                 node.state_reason ? el("div", {class: "muted"}, node.state_reason) : ""],
                badge(node.state), `${number(node.trainers_in_use)} / ${number(inventory.trainers)}`, devices,
                `${(number(inventory.memory_bytes) / 2 ** 30).toFixed(0)} GiB`, age(node.last_heartbeat_time), jobs];
      })));
  }
  first.addEventListener("click", () => {
    token = "";
    again();
  });
  older.addEventListener("click", () => {
    token = next;
    again();
  });
  return {title: "Nodes", refresh, elements: [
    el("h1", {class: "head"}, "Nodes"),
    el("section", {class: "card", "aria-label": "All nodes"}, rows, el("p", {class: "pager"}, first, older))]};
}

// --- One job.

function tiles(job) {
  const progress = job.progress ?? {}, runs = job.state === "RUNNING";
  const evaluation = job.last_eval;
  return [
    ["Steps", `${exact.format(number(progress.step))} / ${exact.format(number(progress.total_steps))}`],
    ["Loss", number(progress.step) ? fixed(4)(number(progress.loss)) : "none yet"],
    ["Held-out loss", evaluation ? `${fixed(4)(number(evaluation.loss))}` : "none yet"],
    ["Tokens a second", runs ? short(number(progress.tokens_per_second)) : "not running"],
    ["Time left", runs ? span(number(progress.eta_seconds)) : "not running"],
    ["Trained tokens", short(number(progress.tokens))],
    ["Checkpoint", number(progress.checkpoint_step) ? `step ${exact.format(number(progress.checkpoint_step))}` : "none yet"],
    ["Busiest rank / mean", number(progress.worker_imbalance) ? fixed(3)(number(progress.worker_imbalance)) : "none yet"],
  ].map(([name, value]) => el("div", {class: "tile"}, el("dt", {}, name), el("dd", {}, value)));
}

const ringOf = ({ring}) => `${words(ring?.kind ?? "")} ${number(ring?.inner)} × ${number(ring?.outer) || 1}`;
const layoutOf = ({layout, stripe}) => words(layout ?? "") + (number(stripe) ? `, stripes of ${number(stripe)} tokens` : "");

// What became of an attempt's plan while it ran, and who holds the others up.
function changesOf(attempt) {
  const outcome = {ANNOUNCED: "is to begin at", IN_FORCE: "from", MISSED: "was not taken up at"};
  const changes = list(attempt.plan_changes).map((change) =>
    `Plan ${number(change.version)} ${outcome[change.state] ?? ""} step ${exact.format(number(change.effective_step))}: ` +
    `${layoutOf(change)}; ${ringOf(change)}; ${list(change.reasons).join("; ")}`);
  const slow = list(attempt.slow_ranks).map(({rank, node, ratio, step}) =>
    `Rank ${number(rank)} on ${id(node)} is slow: ${number(ratio).toFixed(2)} times the time of others for the same work, since ` +
    `step ${exact.format(number(step))}`);
  return [...changes.map((text) => el("li", {}, text)), ...slow.map((text) => el("li", {class: "slow"}, text))];
}

function planOf(attempt) {
  const plan = attempt?.plan;
  if (!plan) return [el("p", {class: "empty"}, "No attempt was planned yet.")];
  const guess = plan.prediction ?? {};
  const now = list(attempt.plan_changes).filter(({state}) => state === "IN_FORCE").at(-1) ?? plan;
  const changes = changesOf(attempt);
  return [
    pairs([["Attempt", String(number(attempt.number))], ["Ring", ringOf(now)], ["Layout", layoutOf(now)],
           ["Predicted", `${span(number(guess.step_seconds))} a step, ${short(number(guess.tokens_per_second))} tokens/s, ` +
             `${percent(number(guess.density))} of causal tiles, imbalance ${fixed(3)(number(guess.worker_imbalance))}`]]),
    el("ul", {class: "plain"}, ...list(plan.reasons).map((reason) => el("li", {}, reason))),
    ...(changes.length ? [el("h3", {}, "Since it began"), el("ul", {class: "plain"}, ...changes)] : [])];
}

function placed(attempt) {
  return list(attempt.placements).map(({node, first_rank, trainers}) => {
    const first = number(first_rank), last = first + number(trainers) - 1;
    return `${id(node)} (${first === last ? `rank ${first}` : `ranks ${first} to ${last}`})`;
  }).join(", ");
}

function attemptsOf(job) {
  const attempts = [...list(job.attempts)].reverse();
  if (attempts.length === 0) return el("p", {class: "empty"}, "None yet.");
  return table("Attempts", [["#", "number"], ["State", ""], ["Steps", "number wide-only"], ["Where", "text wide-only"],
                            ["Why it ended", "text"]],
    attempts.slice(0, 50).map((attempt) => {
      const failure = attempt.failure;
      const why = failure ? `${number(failure.rank) >= 0 ? `rank ${number(failure.rank)} on ${id(failure.node)}: ` : ""}` +
        `${failure.message ?? ""}` : attempt.state_reason ?? "";
      return [String(number(attempt.number)), badge(attempt.state),
              `${exact.format(number(attempt.first_step))} to ${exact.format(number(attempt.last_step))}`,
              placed(attempt), [why, el("span", {class: "more muted"}, placed(attempt))]];
    }));
}

function eventsOf(job, history) {
  const events = [[job.create_time, "submitted" + (job.owner ? ` by ${job.owner}` : "")],
                  [job.start_time, "first trained"], [job.end_time, `ended: ${words(job.state ?? "")}`]];
  for (const attempt of list(job.attempts)) {
    const name = `attempt ${number(attempt.number)}`;
    events.push([attempt.create_time, `${name} began on ${placed(attempt)}`]);
    const why = attempt.failure?.message ?? attempt.state_reason;
    if (attempt.end_time) events.push([attempt.end_time, `${name} ${words(attempt.state ?? "")}${why ? `: ${why}` : ""}`]);
  }
  const known = events.filter(([time]) => time).sort(([a], [b]) => Date.parse(b) - Date.parse(a));
  const checkpoints = list(history.checkpoints).map(({step}) => exact.format(number(step)));
  return [table("Events", [["When", "wide-only"], ["What", "text"]],
                known.slice(0, 100).map(([time, what]) => [when(time), [what, el("span", {class: "more muted"}, when(time))]])),
          checkpoints.length ? el("p", {class: "empty"}, `Checkpoints kept: steps ${checkpoints.join(", ")}`) : ""];
}

function drawSeries(charts, steps, history) {
  const over = (name) => steps.map((step) => [step.at, number(step[name])]);
  const evals = list(history.evals);
  lineChart(charts.loss, {title: "Loss", format: fixed(3), series: [
    {name: "training", points: over("loss")},
    {name: "held out", points: evals.map((report) => [number(report.step), number(report.loss)])},
    {name: "held out, dense", points: evals.filter(({dense}) => dense).map(({step, dense}) => [number(step), number(dense.loss)])}]});
  lineChart(charts.speed, {title: "Tokens a second", zero: true, series: [
    {name: "tokens/s", points: steps.map((step) => [step.at, number(step.tokens) / number(step.step_seconds)])}]});
  areaChart(charts.phases, {title: "Where a step's time goes", format: span, steps: steps.map(({at}) => at),
    layers: PHASES.map((name) => ({name: words(name), values: steps.map(({phases}) => number(phases?.[name]))}))});
  lineChart(charts.imbalance, {title: "Imbalance", format: fixed(3), series: [
    {name: "ranks", points: over("worker_imbalance")}, {name: "ring steps", points: over("step_imbalance")},
    {name: "ranks, by layer and ring step", points: over("ring_imbalance")},
    {name: "groups", points: over("group_imbalance")}]
    .map(({name, points}) => ({name, points: points.map(([at, value]) => [at, value || NaN])}))});
}

// values[row][column] of what `pick` takes from a step: one figure a row.
function columns(details, rows, pick) {
  return rows.map((_, r) => details.map((detail) => pick(detail, r)));
}

function drawMaps(charts, details, probe) {
  const steps = details.map(({step}) => number(step));
  const layers = list(details.find((detail) => list(detail.layers).length)?.layers).map(number);
  const byLayer = (name) => columns(details, layers, (detail, r) => {
    const value = Number(list(detail[name])[r] ?? NaN);
    return value < 0 ? NaN : value;
  });
  const map = {rowName: "layer", rows: layers, columns: steps, format: percent};
  heatMap(charts.density, {...map, title: "Density by layer", what: "of causal tiles", values: byLayer("density")});
  heatMap(charts.recall, {...map, title: "Recall by layer", what: "of attention mass kept", values: byLayer("recall")});
  heatMap(charts.probed, {...map, title: "Probed recall by layer", what: "of attention mass kept",
                          values: byLayer("probed_recall")});
  const probed = list(probe?.layers), heads = probed.map(({by_head}) => list(by_head).map(Number));
  heatMap(charts.heads, {
    title: "Recall by layer and head", what: `of attention mass kept at step ${number(probe?.step)}`, format: percent,
    rowName: "layer", rows: probed.map(({layer}) => number(layer)), values: heads,
    columnName: "head", columns: [...Array(Math.max(0, ...heads.map(({length}) => length))).keys()]});
  const relative = (name) => {
    const rows = [...Array(Math.max(0, ...details.map((detail) => list(detail[name]).length))).keys()];
    return {rows, values: columns(details, rows, (detail, r) => {
      const tiles = list(detail[name]).map(Number), sum = tiles.reduce((a, b) => a + b, 0);
      return r < tiles.length && sum > 0 ? tiles[r] / (sum / tiles.length) : NaN;
    })};
  };
  const even = {columns: steps, format: fixed(3), what: "times the mean"};
  heatMap(charts.ranks, {...even, ...relative("rank_tiles"), title: "Attention work by rank", rowName: "rank"});
  heatMap(charts.ring, {...even, ...relative("ring_step_tiles"), title: "Attention work by ring step", rowName: "ring step"});
}

// The end of a job's log, growing.
function logPanel(get, again, job) {
  const rank = el("input", {type: "number", min: "0", placeholder: "all", inputmode: "numeric"});
  const lines = el("div", {class: "log", tabindex: "0", role: "log", "aria-label": "Log of the newest attempt",
                           "aria-live": "off"});
  let after = 0, attempt = 0, generation = 0;
  const forget = () => {
    ++generation;
    after = 0;
    lines.replaceChildren();
  };
  rank.addEventListener("change", () => {
    forget();
    again();
  });
  async function refresh(newest) {
    if (newest !== attempt) forget();
    attempt = newest;
    if (attempt === 0) return;
    const mine = generation;
    const asked = {attempt, rank: rank.value === "" ? -1 : rank.value, lines: 500};
    const page = await get(`/api/jobs/${job}/logs`, after ? {...asked, after} : asked);
    if (mine !== generation) return;
    const atEnd = lines.scrollHeight - lines.scrollTop - lines.clientHeight < 40;
    for (const line of list(page.lines)) {
      after = Math.max(after, number(line.offset));
      const time = line.time ? new Date(line.time).toLocaleTimeString("sv") : "";
      lines.append(el("div", {class: line.is_stderr ? "err" : ""},
                      el("span", {class: "when"}, `${time} rank ${number(line.rank)}  `), line.text ?? ""));
    }
    while (lines.childElementCount > MOST_LOG_LINES) lines.firstElementChild.remove();
    if (atEnd) lines.scrollTop = lines.scrollHeight;
  }
  return {refresh, element: card("Log", el("div", {class: "controls"}, el("label", {}, "Rank", rank)), lines)};
}

export function jobView(get, again, name) {
  const job = encodeURIComponent(name);
  const parts = {head: el("div"), tiles: el("dl", {class: "tiles"}), plan: el("div"), attempts: el("div"),
                 events: el("div"), spec: el("pre")};
  const charts = {};
  const chart = (key, title) => card(title, charts[key] = el("div"));
  const log = logPanel(get, again, job);
  let drawn = "", history = {};

  function draw() {
    const steps = list(history.steps).map((step) => ({...step, at: number(step.step)}));
    drawSeries(charts, steps, history);
    drawMaps(charts, list(history.details), history.probe);
  }
  async function refresh() {
    const answer = await get(`/api/jobs/${job}`);
    const attempts = list(answer.attempts), newest = attempts.at(-1);
    parts.head.replaceChildren(
      el("div", {class: "head"}, el("h1", {}, id(answer.name)), badge(answer.state),
         el("span", {class: "muted"}, [answer.owner, answer.project && `project ${answer.project}`].filter(Boolean).join(", "))),
      el("p", {class: "reason"}, answer.state_reason ?? ""));
    parts.tiles.replaceChildren(...tiles(answer));
    parts.plan.replaceChildren(...planOf([...attempts].reverse().find(({plan}) => plan)));
    parts.attempts.replaceChildren(attemptsOf(answer));
    parts.spec.textContent = JSON.stringify(answer.spec, null, 2);
    const state = `${answer.revision} ${number(answer.progress?.step)}`;
    if (state !== drawn) {
      history = await get(`/api/jobs/${job}/history`);
      drawn = state;
      draw();
    }
    parts.events.replaceChildren(...eventsOf(answer, history));
    await log.refresh(number(newest?.number));
    return !TERMINAL.includes(answer.state);
  }
  return {title: name, refresh, draw, elements: [
    parts.head, parts.tiles,
    el("div", {class: "grid"}, chart("loss", "Loss"), chart("speed", "Tokens a second"),
       chart("phases", "Where a step's time goes"), chart("imbalance", "Imbalance: busiest / mean"),
       chart("density", "Density by layer"), chart("recall", "Recall by layer"),
       chart("probed", "Probed recall by layer"), chart("heads", "Newest probe: recall by layer and head"),
       chart("ranks", "Attention work by rank"), chart("ring", "Attention work by ring step")),
    card("Plan", parts.plan), card("Attempts", parts.attempts), card("Events", parts.events), log.element,
    card("Job file", el("details", {}, el("summary", {}, "All fields, with defaults"), parts.spec))]};
}
