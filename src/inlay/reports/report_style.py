"""The style of a report's page: of letters, tables and pictures, by the reader's theme and width."""

STYLE = """
:root { color-scheme: light dark; --ink: #1c2128; --soft: #59636e; --line: #d8dee4; --page: #fff; --pane: #f6f8fa;
  --accent: #0b6bcb; --right: 34, 139, 87; --wrong: 200, 60, 50; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ed; --soft: #9da7b3; --line: #3a424b; --page: #15191e; --pane: #1d2229; --accent: #6cb6ff;
    --right: 63, 185, 120; --wrong: 235, 95, 85; } }
* { box-sizing: border-box; }
body { margin: 0; font: 16px/1.55 system-ui, sans-serif; color: var(--ink); background: var(--page); }
main { max-width: 60rem; margin: 0 auto; padding: 2rem 1rem 4rem; }
h1 { font-size: 1.6rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 0 0 .6rem; } h3 { font-size: .95rem; margin: 1rem 0 .3rem; }
p { margin: .4rem 0; max-width: 46rem; } .soft { color: var(--soft); font-size: .9rem; }
.score { font-size: 1.05rem; } .score strong { font-size: 1.9rem; font-variant-numeric: tabular-nums; }
a { color: var(--accent); }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
nav ul { display: flex; flex-wrap: wrap; gap: .2rem 1rem; list-style: none; padding: 0; margin: 1rem 0 0;
  font-size: .9rem; }
section { border-top: 1px solid var(--line); padding-top: 1.2rem; margin-top: 1.8rem; }
section ul { margin: .3rem 0; padding-left: 1.2rem; max-width: 46rem; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; margin: .6rem 0; }
table { border-collapse: collapse; font-size: .92rem; }
caption { text-align: left; color: var(--soft); font-size: .9rem; padding-bottom: .3rem; }
caption.hidden { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
th, td { text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); padding: .3rem 1rem .3rem 0;
  font-weight: normal; overflow-wrap: break-word; min-width: 4.5rem; max-width: 40rem; }
tbody th { min-width: 7.5rem; }
thead th { color: var(--soft); font-weight: 600; vertical-align: bottom; overflow-wrap: normal; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.text { min-width: 16rem; white-space: pre-wrap; }
.second { display: block; color: var(--soft); }
.confusion th, .confusion td { padding: .35rem .6rem; border: 1px solid var(--line); text-align: center;
  min-width: 3rem; max-width: 9rem; font-variant-numeric: tabular-nums; }
.confusion tbody th { text-align: left; } .confusion .none { color: var(--soft); }
.r1 { background: rgba(var(--right), .12); } .r2 { background: rgba(var(--right), .22); }
.r3 { background: rgba(var(--right), .32); } .r4 { background: rgba(var(--right), .42); }
.w1 { background: rgba(var(--wrong), .12); } .w2 { background: rgba(var(--wrong), .22); }
.w3 { background: rgba(var(--wrong), .32); } .w4 { background: rgba(var(--wrong), .42); }
svg { display: block; width: 100%; max-width: 26rem; height: auto; font: 10px system-ui, sans-serif; }
svg text { fill: var(--soft); } svg .grid { stroke: var(--line); } svg .ideal { stroke: var(--soft);
  stroke-dasharray: 4 4; } svg .point { fill: var(--accent); } svg .curve { fill: none; stroke: var(--accent);
  stroke-width: 1.5; } svg .few { fill: none; stroke: var(--accent); } svg .best { fill: var(--page);
  stroke: var(--accent); stroke-width: 2.5; }
.pair { display: flex; flex-wrap: wrap; gap: 1rem 2rem; } figure { margin: 0; flex: 1 1 18rem; max-width: 26rem; }
figcaption { font-weight: 600; font-size: .9rem; margin-bottom: .3rem; }
details { margin: .8rem 0; } summary { cursor: pointer; color: var(--accent); }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(15rem, 1fr)); gap: .8rem 1.5rem;
  margin: .5rem 0; }
dt { color: var(--soft); font-size: .9rem; } dd { margin: 0; overflow-wrap: anywhere; }
pre { background: var(--pane); border: 1px solid var(--line); border-radius: .4rem; padding: .7rem .9rem; margin: 0;
  overflow-x: auto; font-size: .88rem; }
code { font-family: ui-monospace, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }
@media print { nav { display: none; } section { break-inside: avoid-page; } }
"""
