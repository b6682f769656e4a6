"""The page of a timeline: its markup, style and script. What stands in it is computed by timeline_html.

Colours are given for the light and for the dark scheme; eleven categories need as many, told apart by hue and lightness.
"""

from __future__ import annotations

from string import Template

from ullage.report.page import begun

_LIGHT = (
    "#3b6ea8", "#8c9db5", "#d9822b", "#7a4fa3", "#3d9970", "#1aa3b8", "#c2407a", "#e3b341", "#8a6d4b", "#6b8e23", "#777777",
)  # fmt: skip
_DARK = (
    "#6f9fd8", "#a9b8cc", "#f0a35e", "#a986d1", "#63bd93", "#4cc6d8", "#e274a3", "#f2cf6b", "#b89a74", "#a3c65a", "#9a9a9a",
)  # fmt: skip


def _colours(scheme: tuple[str, ...]) -> str:
    return "".join(f"--c{number}:{colour};" for number, colour in enumerate(scheme))


_CLASSES = "".join(
    f".c{number}{{fill:var(--c{number})}}.s{number}{{background:var(--c{number})}}" for number in range(len(_LIGHT))
)

_STYLE = f"""
:root{{color-scheme:light dark;--page:#fff;--ink:#1c2128;--faint:#667080;--rule:#e3e6ea;
--limit:#c5221f;--forward:#dbe9dd;--backward:#e6dcef;--other:#e6e9ee;
{_colours(_LIGHT)}}}
@media (prefers-color-scheme:dark){{:root{{--page:#14171c;--ink:#e6e9ee;--faint:#98a2b0;--rule:#2b313a;
--limit:#ff7b72;--forward:#25402c;--backward:#3a2c4b;--other:#2c323b;
{_colours(_DARK)}}}}}
*{{box-sizing:border-box}}
body{{margin:0 auto;max-width:1240px;padding:24px 20px 48px;background:var(--page);color:var(--ink);font:14px/1.45 system-ui,sans-serif}}
h1{{font-size:20px;margin:0 0 2px}}h2{{font-size:14px;margin:0 0 6px}}
p{{margin:0 0 4px;color:var(--faint)}}p b{{color:var(--ink)}}
figure{{margin:14px 0 18px;position:relative}}
svg{{width:100%;height:auto;display:block;outline:none}}
svg:focus-visible{{outline:2px solid var(--faint)}}
text{{font:12px system-ui,sans-serif;fill:var(--ink)}}
.axis{{fill:var(--faint)}}.strong{{font-weight:600}}
.note{{paint-order:stroke;stroke:var(--page);stroke-width:3.5px;stroke-linejoin:round}}
text.band{{font-size:11px;pointer-events:none}}
.grid{{stroke:var(--rule);fill:none}}
.limit{{stroke:var(--limit);stroke-width:1.6;fill:none}}.soft{{stroke-dasharray:5 4;stroke-width:1.1}}
path.peak{{stroke:var(--ink);stroke-dasharray:2 3;fill:none}}circle.peak{{fill:var(--ink);stroke:var(--page)}}
.forward{{fill:var(--forward)}}.backward{{fill:var(--backward)}}.other{{fill:var(--other)}}
rect.band{{stroke:var(--page);stroke-width:.7}}
#cursor{{stroke:var(--ink);stroke-width:.8;visibility:hidden;pointer-events:none}}
#tip{{position:absolute;top:30px;visibility:hidden;pointer-events:none;background:var(--page);border:1px solid var(--faint);
border-radius:5px;padding:7px 9px;font-size:12px;min-width:220px;box-shadow:0 2px 10px #0003}}
#tip b{{display:block}}#tip div{{display:flex;justify-content:space-between;gap:16px}}
.tables{{display:grid;grid-template-columns:repeat(auto-fit,minmax(430px,1fr));gap:28px}}
table{{border-collapse:collapse;width:100%}}td,th{{padding:3px 6px;border-bottom:1px solid var(--rule);text-align:left}}
td:not(:first-child),th:not(:first-child){{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}}
th{{font-weight:400;color:var(--faint)}}
.swatch{{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:7px}}
{_CLASSES}
"""

_SCRIPT = """
const data = JSON.parse(document.getElementById("data").textContent);
const svg = document.querySelector("svg"), tip = document.getElementById("tip"), cursor = document.getElementById("cursor");
let at = 0;
function show(index) {
  at = index;
  const x = data.x[at];
  cursor.setAttribute("x1", x); cursor.setAttribute("x2", x);
  tip.replaceChildren();
  const head = document.createElement("b");
  head.textContent = data.moments[data.moment[at]];
  tip.append(head);
  const row = (words, value, mark) => {
    const line = document.createElement("div"), left = document.createElement("span"), right = document.createElement("span");
    if (mark !== null) { const swatch = document.createElement("i"); swatch.className = "swatch s" + mark; left.append(swatch); }
    left.append(words); right.textContent = value; line.append(left, right); tip.append(line);
  };
  row("allocated", data.total[at], null);
  data.categories.forEach(([mark, name], number) => { if (data.rows[at][number]) row(name, data.rows[at][number], mark); });
  const box = svg.getBoundingClientRect(), px = x * box.width / svg.viewBox.baseVal.width;
  tip.style.left = px > box.width / 2 ? "" : px + 14 + "px";
  tip.style.right = px > box.width / 2 ? box.width - px + 14 + "px" : "";
  tip.style.visibility = cursor.style.visibility = "visible";
}
function hide() { tip.style.visibility = cursor.style.visibility = "hidden"; }
function last(x) {
  let low = 0, high = data.x.length - 1;
  while (low < high) { const middle = (low + high + 1) >> 1; if (data.x[middle] <= x) low = middle; else high = middle - 1; }
  return low;
}
if (data.x.length) {
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect();
    show(last((event.clientX - box.left) * svg.viewBox.baseVal.width / box.width));
  });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", event => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (by) { event.preventDefault(); show(Math.max(0, Math.min(data.x.length - 1, at + by))); }
  });
}
"""

PAGE = Template(f"""{begun(_STYLE)}<p>Peak: <b>$peak</b></p>
<figure>
<svg viewBox="0 0 1200 $height" tabindex="0" role="img" aria-label="Memory over time, by category. Peak: $peak">
$plot
<line id="cursor" y1="$top" y2="$bottom"></line>
</svg>
<div id="tip"></div>
</figure>
<div class="tables">
<section><h2>Largest at the peak</h2>
<table><thead><tr><th>what</th><th>bytes</th><th>share</th></tr></thead><tbody>$ledger</tbody></table></section>
<section><h2>By category</h2>
<table><thead><tr><th>category</th><th>at the peak</th><th>share</th><th>at its own highest</th></tr></thead>
<tbody>$legend</tbody></table></section>
</div>
<script type="application/json" id="data">$data</script>
<script>{_SCRIPT.replace("$", "$$")}</script>
</body>
</html>
""")
