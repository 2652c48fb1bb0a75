'use strict';
// Draws the page from its data. Names may hold anything: they become text nodes, attributes and canvas text, never markup.
(() => {
  const data = JSON.parse(document.getElementById('data').textContent);
  const at = id => document.getElementById(id);
  const make = (tag, text, kind) => {
    const element = document.createElement(tag);
    if (text !== undefined && text !== null) element.textContent = text;
    if (kind) element.className = kind;
    return element;
  };
  const put = (parent, ...children) => { parent.append(...children); return parent; };
  const scaled = (value, units, base) => {
    let u = 0;
    while (u + 1 < units.length && Math.abs(value) >= base * 0.9995) { value /= base; ++u; }
    return (u === 0 && Number.isInteger(value) ? String(value) : value.toFixed(value < 10 ? 2 : 1)) + units[u];
  };
  const bytes = b => typeof b !== 'number' ? String(b) : scaled(b, [' B', ' kB', ' MB', ' GB', ' TB', ' PB'], 1000);
  const count = c => typeof c !== 'number' ? String(c) : scaled(c, ['', ' k', ' M', ' G', ' T', ' P', ' E'], 1000);
  const seconds = s => {
    if (typeof s !== 'number') return String(s);
    if (s === 0) return '0 s';
    const size = Math.abs(s);
    const [by, unit] = size < 1e-6 ? [1e9, ' ns'] : size < 1e-3 ? [1e6, ' \u00b5s'] : size < 1 ? [1e3, ' ms'] : [1, ' s'];
    return (size * by >= 1000 ? Math.round(s * by) : (s * by).toPrecision(3)) + unit;
  };
  const plural = (n, what) => n + ' ' + what + (n === 1 ? '' : 's');
  const percent = x => (100 * x).toFixed(x < 0.0995 ? 1 : 0) + ' %';

  const activities = [['forward', 'forward'], ['backward', 'backward'], ['weight gradient', 'weight'], ['update', 'update'],
    ['communication', 'communication'], ['data', 'data'], ['host copy', 'copy']];
  const memories = [['parameters', 'parameters'], ['gradients', 'gradients'], ['state', 'optimizer state'], ['activations', 'activations'],
    ['buffers', 'buffers'], ['copies', 'copies of offloaded']];
  let paint = {};
  const readColors = () => {
    const style = getComputedStyle(document.documentElement);
    paint = {};
    for (const name of ['back', 'raised', 'text', 'dim', 'line', 'accent', 'idle', 'hatch', 'grid', 'measured', ...activities.map(a => a[1])])
      paint[name] = style.getPropertyValue('--' + name).trim();
  };
  const swatch = (color, text) => {
    const item = make('span'), box = make('i');
    box.style.background = 'var(--' + color + ')';
    return put(item, box, text);
  };

  // ---- head -------------------------------------------------------------------------------------------------------
  const measured = data.measured, predicted = data.predicted;
  const entryText = data.entry === 'train' ? 'training step' : data.entry;
  document.title = data.model + ': ' + data.strategy;
  at('title').textContent = data.model;
  at('subtitle').textContent = (data.strategy || 'one device') + ' \u00b7 ' + data.devices + (data.devices === 1 ? ' device' : ' devices') + ' \u00b7 ' + entryText + ' of ' +
    data.batch + ' samples' + (data.micro_batches > 1 ? ' in ' + data.micro_batches + ' micro-batches' : '') + ' \u00b7 ' + data.precision + (data.zero ? ' \u00b7 ZeRO ' + data.zero : '');
  const figure = (name, value) => put(at('figures'), put(make('div'), make('dt', name), make('dd', value)));
  const predictedSeconds = predicted ? predicted.seconds : 0;
  if (predicted) figure('predicted step', seconds(predicted.seconds));
  if (measured) figure('measured step', seconds(measured.seconds));
  if (measured && predictedSeconds > 0) figure('measured / predicted', (measured.seconds / predictedSeconds).toFixed(2));
  const step = measured ? measured.seconds : predictedSeconds;
  if (step > 0 && data.batch) figure('samples a second', count(data.batch / step));
  const loadOf = c => c.predicted && predictedSeconds > 0 ? c.predicted.compute / predictedSeconds : null;
  const measuredLoad = c => c.measured && measured.seconds > 0 ? c.measured.compute / measured.seconds : null;
  if (predicted) {
    let busy = 0, all = 0;
    for (const c of data.classes) { busy += c.count * loadOf(c); all += c.count; }
    if (all) figure('computing, mean of devices', percent(busy / all));
  }
  const largest = Math.max(1, ...data.classes.map(c => c.memory_bytes || c.memory_total));
  const fullest = data.classes.reduce((a, c) => c.memory_total / (c.memory_bytes || largest) > a.memory_total / (a.memory_bytes || largest) ? c : a, data.classes[0]);
  if (fullest) figure('fullest device, memory', bytes(fullest.memory_total) + (fullest.memory_bytes ? ' of ' + bytes(fullest.memory_bytes) : ''));

  const numbers = c => c.devices.replace(/ \(\d+ together\)$/, '');
  const one = c => c.kind + ' ' + c.first + (c.name.includes('@') ? ' (' + c.name + ')' : '');

  // ---- cluster ----------------------------------------------------------------------------------------------------
  const memoryText = c => memories.filter(m => c.memory[m[0]] > 0).map(m => m[1] + ' ' + bytes(c.memory[m[0]])).join('\n') +
    (c.host_memory ? '\nin the host\u2019s memory ' + bytes(c.host_memory) : '');
  const meter = (parts, kind) => {
    const bar = make('div', null, 'meter ' + kind);
    for (const [share, color] of parts) {
      const part = make('i');
      part.style.width = (100 * Math.max(0, Math.min(1, share))).toFixed(2) + '%';
      if (color) part.style.background = 'var(--' + color + ')';
      bar.append(part);
    }
    return bar;
  };
  const line = (left, right, over) => put(make('small'), make('span', left), make('span', right, over ? 'over' : ''));
  const deviceBox = (slot) => {
    const c = data.classes[slot.class];
    if (!c) return put(make('div', null, 'device'), make('b', plural(slot.count, 'device')));
    const box = make('div', null, 'device');
    const name = slot.count > 1 ? slot.count + ' \u00d7 ' + c.kind : c.kind + ' ' + slot.device;
    put(box, put(make('header'), make('b', name), make('span', data.stages > 1 ? 'stage ' + c.stage : plural(c.samples, 'sample'))));
    const load = loadOf(c);
    if (load !== null) put(box, line('load', percent(load)), meter([[load]], 'load'));
    const run = measuredLoad(c);
    if (run !== null) put(box, line('load, measured', percent(run)), meter([[run]], 'load'));
    const of = c.memory_bytes || largest;
    put(box, line('memory', bytes(c.memory_total) + (c.memory_bytes ? ' of ' + bytes(c.memory_bytes) : ''), c.memory_bytes && c.memory_total > c.memory_bytes),
      meter(memories.map(m => [c.memory[m[0]] / of, m[0]]), 'memory'));
    box.title = (slot.count > 1 ? name : one({...c, first: slot.device})) + '\n' + c.parts.join('\n') + (c.parts.length ? '\n' : '') + memoryText(c);
    return box;
  };
  put(at('memory-key'), make('span', 'load: share of the step in which it computes'), ...memories.filter(m => data.classes.some(c => c.memory[m[0]] > 0)).map(m => swatch(...m)));
  for (const node of data.nodes.list) {
    const title = (node.count > 1 ? node.count + ' nodes alike: ' : 'node ') + node.nodes + (data.nodes.each ? '' : ', ' + node.devices + ' devices' + (node.count > 1 ? ' each' : ''));
    const slots = make('div', null, 'slots');
    node.slots.forEach(slot => slots.append(deviceBox(slot)));
    put(at('cluster'), put(make('div', null, 'node'), make('h3', title), slots));
  }
  if (data.nodes.left_out) put(at('cluster'), make('p', 'and ' + data.nodes.left_out + ' more kinds of nodes', 'none'));

  // ---- timeline ---------------------------------------------------------------------------------------------------
  const kLeft = 190, kRow = 17, kGroup = 20;
  const drawn = [];  // rows from top to bottom
  let height = 0;
  const title = c => (data.stages > 1 ? 'stage ' + c.stage + ', ' : '') + (c.count > 1 ? c.count + ' \u00d7 ' + c.kind + ': ' + numbers(c) : one(c));
  const tracksOf = (timeline, k) => timeline ? timeline.tracks.filter(t => t.class === k) : [];
  data.classes.forEach((c, k) => {
    const both = [[predicted, tracksOf(predicted, k), false], [measured, tracksOf(measured, k), true]];
    if (!both[0][1].length && !both[1][1].length) return;
    drawn.push({y: height, height: kGroup, group: title(c)});
    height += kGroup;
    data.queues.forEach((name, queue) => {
      for (const [timeline, tracks, run] of both) {
        const track = tracks.find(t => t.queue === queue);
        if (!track) continue;
        drawn.push({y: height, height: kRow, track, timeline, run, compute: queue === 0, name: name + (measured && predicted ? (run ? ' measured' : ' predicted') : ''), of: c});
        height += kRow;
      }
    });
    height += 6;
  });
  const canvas = at('spans'), axis = at('axis');
  const longest = Math.max(predicted ? predicted.seconds : 0, measured ? measured.seconds : 0) || 1;
  let view = {begin: 0, end: 1};  // of the whole width
  let alike = false;              // each timeline as wide as the other
  let chosen = null;              // {row, span}
  const lengthOf = timeline => (alike ? timeline.seconds : longest) || 1;
  const fraction = (row, ticks) => ticks * row.timeline.tick / lengthOf(row.timeline);
  const width = () => Math.max(50, canvas.clientWidth - kLeft);
  const pixel = f => kLeft + (f - view.begin) / (view.end - view.begin) * width();

  // The first span that ends at or behind these ticks.
  const firstSpan = (spans, ticks) => {
    let low = 0, high = spans.length / 4;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (spans[4 * middle + 1] + spans[4 * middle + 2] < ticks) low = middle + 1; else high = middle;
    }
    return low;
  };
  const clip = (context, text, room) => {
    if (context.measureText(text).width <= room) return text;
    let n = Math.floor(text.length * room / context.measureText(text).width);
    while (n > 0 && context.measureText(text.slice(0, n) + '\u2026').width > room) --n;
    return n > 0 ? text.slice(0, n) + '\u2026' : '';
  };
  const size = (element, high) => {
    const ratio = window.devicePixelRatio || 1, wide = element.clientWidth;
    element.style.height = high + 'px';
    if (element.width !== Math.round(wide * ratio)) element.width = Math.round(wide * ratio);
    if (element.height !== Math.round(high * ratio)) element.height = Math.round(high * ratio);
    const context = element.getContext('2d');
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, wide, high);
    context.font = '11px system-ui, "Segoe UI", "Liberation Sans", sans-serif';
    context.textBaseline = 'middle';
    return context;
  };
  const ticksOfAxis = () => {
    const total = alike ? 1 : longest, range = (view.end - view.begin) * total;
    const rough = range / Math.max(2, width() / 110), power = Math.pow(10, Math.floor(Math.log10(rough)));
    const by = [1, 2, 5, 10].find(m => m * power >= rough) * power, list = [];
    for (let k = Math.ceil(view.begin * total / by); k * by <= view.end * total * (1 + 1e-12); ++k) list.push([k * by / total, alike ? +(100 * k * by).toPrecision(6) + ' %' : seconds(+(k * by).toPrecision(10))]);
    return list;
  };
  let hatch = null;
  const hatched = context => {
    const cell = document.createElement('canvas');
    cell.width = cell.height = 8;
    const pen = cell.getContext('2d');
    pen.fillStyle = paint.idle;
    pen.fillRect(0, 0, 8, 8);
    pen.strokeStyle = paint.hatch;
    pen.beginPath();
    for (const k of [-8, 0, 8]) { pen.moveTo(k, 8); pen.lineTo(k + 8, 0); }
    pen.stroke();
    return context.createPattern(cell, 'repeat');
  };
  const drawSpans = (context, row) => {
    const {spans} = row.track, scale = lengthOf(row.timeline) / row.timeline.tick, labels = row.timeline.labels;
    const y = row.y + 2, h = row.height - 4, right = kLeft + width();
    let last = -1, lastColor = '';
    for (let k = firstSpan(spans, view.begin * scale); k < spans.length / 4; ++k) {
      const start = spans[4 * k + 1];
      let a = pixel(start / scale), b = pixel((start + spans[4 * k + 2]) / scale);
      if (a > right) break;
      a = Math.max(a, kLeft);
      b = Math.min(Math.max(b, a + 0.7), right);
      const label = labels[spans[4 * k]], color = paint[activities[label[3]][1]];
      if (b <= last && color === lastColor) continue;  // on a pixel that is painted
      context.fillStyle = color;
      const gap = b - a > 3 ? 0.6 : 0;
      context.fillRect(a, y, b - a - gap, h);
      last = b;
      lastColor = color;
      if (b - a > 34) {
        context.fillStyle = '#14181d';
        context.fillText(clip(context, label[0] || label[1], b - a - 8), a + 4, y + h / 2 + 0.5);
      }
    }
  };
  const draw = () => {
    const context = size(canvas, Math.max(height, 30)), head = size(axis, 22);
    const wide = canvas.clientWidth;
    hatch = hatched(context);
    head.fillStyle = paint.dim;
    const marks = ticksOfAxis();
    for (const [f, text] of marks) {
      const x = pixel(f);
      head.textAlign = x > wide - 40 ? 'right' : x < kLeft + 4 ? 'left' : 'center';
      head.fillText(text, Math.min(x, wide - 3), 12);
    }
    context.strokeStyle = paint.grid;
    context.beginPath();
    for (const [f] of marks) { const x = Math.round(pixel(f)) + 0.5; context.moveTo(x, 0); context.lineTo(x, height); }
    context.stroke();
    for (const row of drawn) {
      if (row.group !== undefined) {
        context.fillStyle = paint.text;
        context.font = '600 12px system-ui, "Segoe UI", "Liberation Sans", sans-serif';
        context.fillText(clip(context, row.group, wide - 16), 8, row.y + kGroup / 2 + 1);
        context.font = '11px system-ui, "Segoe UI", "Liberation Sans", sans-serif';
        continue;
      }
      context.fillStyle = paint.dim;
      context.fillText(clip(context, row.name, kLeft - 28), 20, row.y + row.height / 2 + 0.5);
      const begin = Math.max(kLeft, pixel(0)), end = Math.min(kLeft + width(), pixel(row.timeline.seconds / lengthOf(row.timeline)));
      if (end > begin) {
        context.fillStyle = row.compute ? hatch : row.run ? paint.measured : paint.raised;
        context.fillRect(begin, row.y + 2, end - begin, row.height - 4);
      }
      drawSpans(context, row);
    }
    if (chosen) {
      const [a, b] = edges(chosen);
      context.strokeStyle = paint.text;
      context.lineWidth = 2;
      context.strokeRect(Math.max(a, kLeft), chosen.row.y + 1, Math.max(2, Math.min(b, kLeft + width()) - Math.max(a, kLeft)), chosen.row.height - 2);
      context.lineWidth = 1;
    }
  };
  let asked = false;
  const redraw = () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => { asked = false; draw(); });
  };
  const edges = ({row, span}) => {
    const start = row.track.spans[4 * span + 1];
    return [pixel(fraction(row, start)), pixel(fraction(row, start + row.track.spans[4 * span + 2]))];
  };
  const kLeast = 1e-6;
  const show = (begin, end) => {
    const length = Math.min(1, Math.max(kLeast, end - begin));
    begin = Math.min(Math.max(0, begin), 1 - length);
    view = {begin, end: begin + length};
    redraw();
  };
  const zoom = (by, around) => {
    const f = around === undefined ? (view.begin + view.end) / 2 : around, length = Math.min(1, Math.max(kLeast, (view.end - view.begin) * by));
    const share = (f - view.begin) / (view.end - view.begin);
    show(f - share * length, f + (1 - share) * length);
  };
  const pan = by => show(view.begin + by * (view.end - view.begin), view.end + by * (view.end - view.begin));

  // ---- what is under the pointer ----------------------------------------------------------------------------------
  const place = event => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  const under = (x, y) => {
    const row = drawn.find(r => r.track && y >= r.y && y < r.y + r.height);
    if (!row || x < kLeft) return null;
    const slack = 1.5 / width() * (view.end - view.begin), scale = lengthOf(row.timeline) / row.timeline.tick;
    const f = view.begin + (x - kLeft) / width() * (view.end - view.begin), spans = row.track.spans;
    const k = firstSpan(spans, (f - slack) * scale);
    if (4 * k < spans.length && spans[4 * k + 1] <= (f + slack) * scale) return {row, span: k};
    if (f * scale * row.timeline.tick > row.timeline.seconds) return null;
    const before = k > 0 ? spans[4 * k - 3] + spans[4 * k - 2] : 0;
    const after = 4 * k < spans.length ? spans[4 * k + 1] : row.timeline.seconds / row.timeline.tick;
    return {row, idle: [before * row.timeline.tick, after * row.timeline.tick]};
  };
  const describe = hit => {
    const {row} = hit, where = title(row.of) + ', ' + row.name;
    if (hit.idle) return (row.compute ? 'bubble: nothing to compute' : 'idle') + '\n' + seconds(hit.idle[1] - hit.idle[0]) + ' from ' + seconds(hit.idle[0]) + '\n' + where;
    const k = 4 * hit.span, spans = row.track.spans, [name, op, scope, activity, number, flops] = row.timeline.labels[spans[k]];
    const length = spans[k + 2] * row.timeline.tick, lines = [name || op];
    lines.push((name ? op + ' \u00b7 ' : '') + activities[activity][0] + (number > 1 ? ' \u00b7 ' + number + ' instructions together' : ''));
    if (scope) lines.push('scope ' + scope);
    if (data.micro_batches > 1) lines.push('micro-batch ' + spans[k + 3]);
    lines.push(seconds(length) + ' from ' + seconds(spans[k + 1] * row.timeline.tick));
    if (typeof flops === 'number' && flops > 0) lines.push(count(flops) + 'FLOPs' + (length > 0 ? ', ' + count(flops / length) + 'FLOP/s' : ''));
    lines.push(where);
    return lines.join('\n');
  };
  const tip = at('tip');
  const showTip = (text, x, y) => {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(4, Math.min(x + 14, innerWidth - box.width - 6)) + 'px';
    tip.style.top = (y + 18 + box.height > innerHeight ? Math.max(4, y - box.height - 12) : y + 18) + 'px';
  };
  const hideTip = () => { tip.hidden = true; };
  let drag = null;
  canvas.addEventListener('pointerdown', event => {
    drag = {x: event.clientX, begin: view.begin, end: view.end};
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener('pointerup', event => {
    if (drag && Math.abs(event.clientX - drag.x) < 3) {
      const hit = under(...place(event));
      chosen = hit && !hit.idle ? hit : null;
      at('said').textContent = hit ? describe(hit).replace(/\n/g, ' \u00b7 ') : '';
      redraw();
    }
    drag = null;
  });
  canvas.addEventListener('pointermove', event => {
    if (drag) {
      const by = (event.clientX - drag.x) / width() * (drag.end - drag.begin);
      hideTip();
      return show(drag.begin - by, drag.end - by);
    }
    const hit = under(...place(event));
    if (hit) showTip(describe(hit), event.clientX, event.clientY); else hideTip();
  });
  canvas.addEventListener('pointerleave', hideTip);
  canvas.addEventListener('pointercancel', () => { drag = null; });
  canvas.addEventListener('wheel', event => {
    if (event.ctrlKey || event.metaKey || event.altKey) {
      event.preventDefault();
      const [x] = place(event);
      zoom(Math.pow(1.0025, event.deltaY), view.begin + Math.max(0, x - kLeft) / width() * (view.end - view.begin));
    } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      pan((event.deltaX || event.deltaY) / width());
    }
    hideTip();
  }, {passive: false});
  canvas.addEventListener('dblclick', event => {
    const [x] = place(event);
    zoom(0.4, view.begin + Math.max(0, x - kLeft) / width() * (view.end - view.begin));
  });
  // The next op of the row that one is chosen in, or the first that is seen.
  const walk = by => {
    const rows = drawn.filter(r => r.track);
    if (!rows.length) return;
    if (!chosen) {
      const row = rows[0], k = firstSpan(row.track.spans, view.begin * lengthOf(row.timeline) / row.timeline.tick);
      chosen = {row, span: Math.min(k, row.track.spans.length / 4 - 1)};
    } else {
      chosen = {row: chosen.row, span: Math.min(chosen.row.track.spans.length / 4 - 1, Math.max(0, chosen.span + by))};
    }
    reveal();
  };
  const walkRows = by => {
    const rows = drawn.filter(r => r.track);
    if (!rows.length) return;
    const now = chosen ? rows.indexOf(chosen.row) : -1, row = rows[Math.min(rows.length - 1, Math.max(0, now + by))];
    const time = chosen ? fraction(chosen.row, chosen.row.track.spans[4 * chosen.span + 1]) : view.begin;
    const k = firstSpan(row.track.spans, time * lengthOf(row.timeline) / row.timeline.tick);
    chosen = {row, span: Math.min(k, row.track.spans.length / 4 - 1)};
    reveal();
  };
  const reveal = () => {
    const start = fraction(chosen.row, chosen.row.track.spans[4 * chosen.span + 1]), end = start + fraction(chosen.row, chosen.row.track.spans[4 * chosen.span + 2]);
    if (start < view.begin || end > view.end) {
      const length = Math.max(view.end - view.begin, end - start);
      show((start + end - length) / 2, (start + end + length) / 2);
    }
    const rows = at('rows');
    if (chosen.row.y < rows.scrollTop) rows.scrollTop = chosen.row.y - 10;
    if (chosen.row.y + kRow > rows.scrollTop + rows.clientHeight) rows.scrollTop = chosen.row.y + kRow + 10 - rows.clientHeight;
    at('said').textContent = describe(chosen).replace(/\n/g, ' \u00b7 ');
    redraw();
  };
  const keys = {
    ArrowLeft: () => pan(-0.15), ArrowRight: () => pan(0.15), ArrowUp: () => walkRows(-1), ArrowDown: () => walkRows(1), '+': () => zoom(0.6), '=': () => zoom(0.6),
    '-': () => zoom(1 / 0.6), _: () => zoom(1 / 0.6), 0: () => show(0, 1), Home: () => show(0, 1), n: () => walk(1), p: () => walk(-1), Escape: () => { chosen = null; at('said').textContent = ''; redraw(); },
  };
  canvas.addEventListener('keydown', event => {
    if (event.ctrlKey || event.metaKey || event.altKey || !Object.hasOwn(keys, event.key)) return;
    event.preventDefault();
    hideTip();
    keys[event.key]();
  });
  const button = (text, label, act) => {
    const element = make('button', text);
    element.type = 'button';
    element.setAttribute('aria-label', label);
    element.addEventListener('click', act);
    at('buttons').append(element);
    return element;
  };
  if (drawn.length) {
    button('\u2212', 'zoom out', () => zoom(1 / 0.6));
    button('+', 'zoom in', () => zoom(0.6));
    button('whole step', 'show the whole step', () => show(0, 1));
    if (measured && predicted) {
      const toggle = button('same width', 'draw the predicted and the measured step at the same width', () => {
        alike = !alike;
        toggle.setAttribute('aria-pressed', String(alike));
        redraw();
      });
      toggle.setAttribute('aria-pressed', 'false');
    }
    const seen = new Set();
    for (const timeline of [predicted, measured]) if (timeline) timeline.labels.forEach(l => seen.add(l[3]));
    put(at('timeline-key'), ...activities.filter((_, k) => seen.has(k)).map(a => swatch(a[1], a[0])), swatch('hatch', 'bubble (nothing to compute)'));
    const together = [predicted, measured].filter(t => t && t.spans < t.instructions).map(t => t.instructions + ' instructions are drawn as ' + t.spans);
    if (together.length) put(at('timeline-key'), make('span', together.join('; ')));
    if (data.classes_left_out) put(at('timeline-key'), make('span', 'and ' + data.classes_left_out + ' more classes of devices'));
    readColors();
    draw();
    new ResizeObserver(redraw).observe(canvas);
    matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => { readColors(); redraw(); });
  } else {
    at('timeline').hidden = at('hint').hidden = true;
    put(at('timeline-key'), make('span', 'There is no timeline: see the notes.'));
  }

  // ---- tables -----------------------------------------------------------------------------------------------------
  const table = (id, columns, rows, more, none) => {
    const element = at(id);
    if (!rows.length) return element.replaceWith(make('p', none, 'none'));
    const head = make('tr');
    for (const [name, kind] of columns) head.append(put(make('th', name, kind)));
    put(element, put(make('thead'), head));
    const body = make('tbody');
    for (const row of rows) {
      const line = make('tr');
      columns.forEach(([, kind, cell]) => {
        const value = cell(row), td = make('td', null, kind);
        if (Array.isArray(value)) value.forEach(text => td.append(make('div', text))); else td.textContent = value;
        line.append(td);
      });
      body.append(line);
    }
    element.append(body);
    if (more) element.after(make('p', more, 'none'));
  };
  const some = (value, text) => value === null || value === undefined ? '' : text(value);
  table('shares', [
    ['devices', 'name', c => c.count > 1 ? [numbers(c), plural(c.count, 'device')] : one(c)],
    ['node', 'short', c => c.nodes],
    ['samples', 'number', c => [c.samples, data.batch ? percent(c.samples / data.batch) : '']],
    ['part', 'text', c => c.parts.length ? c.parts : data.stages > 1 ? 'the whole stage' : 'the whole'],
    ['FLOPs', 'number', c => count(c.flops)],
    ['computes', 'number', c => [some(loadOf(c), percent), ...(measured ? [some(measuredLoad(c), x => percent(x) + ' measured')] : [])]],
    ['communicates', 'number', c => [c.predicted && predictedSeconds > 0 ? percent((c.predicted.activities.communication || 0) / predictedSeconds) : '',
      ...(c.collectives ? [plural(c.collectives, 'collective') + ', ' + bytes(c.communicated)] : []), ...(c.messages ? [plural(c.messages, 'message')] : [])]],
    ['memory', 'bytes', c => [bytes(c.memory_total) + (c.memory_bytes ? ' of ' + bytes(c.memory_bytes) : ''), ...memoryText(c).split('\n')]],
    ['why', 'text', c => c.why],
  ], data.classes, data.classes_left_out ? 'and ' + data.classes_left_out + ' more classes of devices' : '', 'no devices');
  table('reshards', [
    ['tensor', 'name', r => [r.tensor, r.dtype + '[' + r.dims.join(',') + ']']],
    ['from', 'short', r => r.from],
    ['to', 'short', r => r.to],
    ['along', 'short', r => [r.axis, plural(r.devices, 'device')]],
    ['phase', '', r => r.phase],
    ['way', 'short', r => r.way],
    ['times a step', 'number', r => r.times],
    ['bytes a step', 'number', r => bytes(r.bytes)],
    ['seconds a step', 'number', r => seconds(r.seconds)],
    ['what else was legal', 'text', r => r.alternatives.map(w => w.name + ': ' + bytes(w.bytes) + ', ' + seconds(w.seconds) + ' each time')],
  ], data.reshards, data.reshards_left_out ? 'and ' + data.reshards_left_out + ' more, cheaper ones' : '', 'Nothing is moved between devices.');
  if (data.notes.length) data.notes.forEach(note => at('notes').append(make('li', note)));
  else at('notes').replaceWith(make('p', 'none', 'none'));
})();
