# SPDX-License-Identifier: Apache-2.0
"""The look and the few lines of script of `amp-ir report`'s page; light and dark."""

STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; --quiet: #71717a;
  --forward: #2563eb; --backward: #c2410c; --optimizer: #7c3aed; --low: #15803d;
  --parameter: #64748b; --buffer: #94a3b8; --optimizer-state: #94a3b8; --other: #cbd5e1;
  --low-copy: #0d9488; --saved: #16a34a; --gradient: #ea580c; --temporary: #8b5cf6;
  --workspace: #b45309; }
@media (prefers-color-scheme: dark) {
  :root { --quiet: #a1a1aa; --forward: #60a5fa; --backward: #fb923c; --optimizer: #a78bfa;
    --low: #4ade80; --parameter: #64748b; --optimizer-state: #475569; --buffer: #475569;
    --other: #334155; --low-copy: #2dd4bf; --saved: #22c55e; --gradient: #f97316;
    --temporary: #a78bfa; --workspace: #d97706; } }
* { box-sizing: border-box }
body { font: 14px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 80rem;
  padding: 0 1rem; }
h1 { font-size: 1.4rem; margin: 0 0 .2rem } h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem }
p { margin: .3rem 0 } .quiet { color: var(--quiet) }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: .8rem;
  margin: 1.2rem 0 }
.facts div { border: 1px solid var(--line); border-radius: .4rem; padding: .6rem .8rem }
.facts b { display: block; font-size: 1.35rem; font-weight: 600 }
.chart { display: grid; margin-top: 2.4rem; grid-template-columns: 5.2rem 1fr; column-gap: .5rem }
.axis { position: relative; color: var(--quiet); font-size: .85em }
.axis span { position: absolute; right: 0; transform: translateY(50%); white-space: nowrap }
.plot { position: relative; height: 20rem; border: solid var(--line); border-width: 1px 0 }
.plot svg { width: 100%; height: 100%; display: block; position: relative }
.plot .band { position: absolute; top: -1.5rem; bottom: 0; font-style: normal;
  background: color-mix(in srgb, var(--tone) 10%, transparent); border-left: 1px solid var(--line) }
.plot .band span { color: var(--tone); font-size: .85em; padding-left: .3rem; display: block;
  overflow: hidden; white-space: nowrap }
.plot .rule { position: absolute; left: 0; right: 0; border-top: 1px solid var(--line) }
.plot .peak, .plot .cursor { position: absolute; top: 0; bottom: 0; width: 0;
  border-left: 1px dashed CanvasText; pointer-events: none }
.plot .cursor { border-left: 1px solid CanvasText } [hidden] { display: none !important }
.ends { grid-column: 2; color: var(--quiet); font-size: .85em }
.key { margin: .6rem 0 } .key span { display: inline-block; margin-right: 1.1rem }
.swatch { display: inline-block; width: .75rem; height: .75rem; border-radius: .15rem;
  margin-right: .35rem; background: var(--tone); vertical-align: -1px }
.under { min-height: 2.9em; color: var(--quiet) }
path { fill: var(--tone) }
.role-parameter { --tone: var(--parameter) } .role-buffer { --tone: var(--buffer) }
.role-optimizer-state { --tone: var(--optimizer-state) } .role-other-state { --tone: var(--other) }
.role-batch, .role-result { --tone: var(--other) }
.role-low-copy-of-a-weight { --tone: var(--low-copy) }
.role-saved-activation { --tone: var(--saved) } .role-gradient { --tone: var(--gradient) }
.role-temporary { --tone: var(--temporary) } .role-library-workspace { --tone: var(--workspace) }
.phase-forward { --tone: var(--forward) } .phase-backward { --tone: var(--backward) }
.phase-optimizer { --tone: var(--optimizer) } .phase-other { --tone: var(--quiet) }
.track { display: block; position: relative; height: 1em; min-width: 14rem;
  background: var(--soft) }
.track i { position: absolute; top: 0; bottom: 0; min-width: 1px; background: var(--tone) }
.wide { overflow-x: auto } table { border-collapse: collapse; width: 100% }
th { text-align: left; padding: .35rem .6rem; white-space: nowrap }
td { padding: .3rem .6rem; border-top: 1px solid var(--line); vertical-align: top }
td.name { overflow-wrap: anywhere; min-width: 13rem } td.kind { white-space: nowrap }
 .number { text-align: right;
  white-space: nowrap; font-variant-numeric: tabular-nums }
.bar { display: block; min-width: 5rem; height: .7rem; margin-top: .3rem;
  background: var(--soft) }
.bar i { display: block; height: 100%; background: var(--tone); min-width: 1px }
input { font: inherit; padding: .3rem .5rem; width: 22rem; max-width: 100%; margin: .2rem 0 .6rem }
pre { overflow-x: auto; background: var(--soft); padding: .6rem .8rem; border-radius: .4rem }
details summary { cursor: pointer; margin: .6rem 0; color: var(--quiet) }
@media (max-width: 40rem) { body { margin: 1rem auto; padding: 0 .7rem }
  .facts { grid-template-columns: 1fr 1fr } .plot { height: 14rem }
  .chart { grid-template-columns: 3.6rem 1fr }
  td, th { padding: .3rem .35rem } td.name { min-width: 11rem } .bar { min-width: 2.5rem }
  #held thead { display: none } #held td { border: 0; padding: 0; overflow-wrap: anywhere }
  #held tr { display: flex; flex-wrap: wrap; column-gap: .7rem; padding: .4rem 0;
    border-top: 1px solid var(--line) }
  #held td:first-child { flex: 1 1 60%; min-width: 0 } #held td:last-child { flex: 1 1 100% } }
"""
SCRIPT = """
const moments = JSON.parse(document.querySelector("#moments").textContent);
const plot = document.querySelector(".plot"), under = document.querySelector(".under");
if (plot) {
  const cursor = plot.querySelector(".cursor"), idle = under.textContent;
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    const share = Math.min(Math.max((event.clientX - box.left) / box.width, 0), 0.99999);
    const at = Math.floor(share * moments.length);
    cursor.hidden = false;
    cursor.style.left = `${(at + 0.5) / moments.length * 100}%`;
    under.textContent = `call ${at}: ${moments[at]}`;
  });
  plot.addEventListener("pointerleave", () => { cursor.hidden = true; under.textContent = idle; });
}
const find = document.querySelector("input");
find.addEventListener("input", () => {
  const word = find.value.toLowerCase();
  for (const row of document.querySelectorAll("#kernels tbody tr"))
    row.hidden = !row.textContent.toLowerCase().includes(word);
});
"""
