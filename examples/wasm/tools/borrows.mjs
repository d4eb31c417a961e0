// borrows.mjs APP.wasm: changes a component of componentize-qjs 0.4, in place, to return borrowed handles in time.
//
// A function must drop borrowed handles before it returns, and may call no imports in its post-return function
// (CanonicalABI.md, "Lifting and Lowering"). componentize-qjs drops them in post-return, which traps. This script makes its
// glue module drop them at the end of the function, and makes the calls in post-return do nothing.
import fs from 'node:fs';
import { parse, print } from '@bytecodealliance/jco';

const file = process.argv[2];
const lines = (await print(fs.readFileSync(file))).split('\n');
const glue = lines.findIndex((l) => /^ +\(core module \$wit-dylib\.wasm/.test(l));
const elements = lines.findIndex((l, i) => i > glue && /^ +\(elem /.test(l));
const drops = lines[elements].match(/\$"\[resource-drop\][^"]+"/g); // indexed by the number of the resource

// Save each handle in a local of its function, because parameters of more than 16 core values are in memory, freed earlier.
const inserts = []; // [line, text to insert before it]
const borrowed = new Set();
let header = 0; // where locals of the function end
let open = [];
for (let i = elements; i < lines.length && !/^ +\(core module /.test(lines[i]); i++) {
  if (/^ {6}\(func /.test(lines[i])) {
    header = i + 1;
    while (/^ {8}\((param|result|local|type) /.test(lines[header])) header++;
  }
  if (/call \$wit_dylib_push_borrow$/.test(lines[i])) {
    let resource = i - 1; // before the instructions that load the handle
    while (!/^ +i32\.const \d+$/.test(lines[resource])) resource--;
    const drop = drops[lines[resource].match(/\d+$/)[0]];
    const local = `$borrowed${open.length}`;
    inserts.push([header, `        (local ${local} i32)`], [i, `        local.tee ${local}`]);
    open.push(`        local.get ${local}\n        call ${drop}`);
    borrowed.add(drop);
  }
  if (/^ {6}\)$/.test(lines[i])) {
    if (open.length) inserts.push([i, open.join('\n')]);
    open = [];
  }
}
inserts.sort(([a], [b]) => a - b);
for (const [at, text] of inserts.reverse()) lines.splice(at, 0, text);
for (const name of borrowed) lines[elements] = lines[elements].replace(name, '$nothing');
lines.splice(elements, 0, '      (func $nothing (param i32))');
if (borrowed.size) fs.writeFileSync(file, await parse(lines.join('\n')));
