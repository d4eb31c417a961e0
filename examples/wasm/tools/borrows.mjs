// borrows.mjs APP.wasm: makes a component of componentize-qjs 0.4 give borrowed handles back in time, in place.
//
// A function must drop the handles that it has borrowed before it returns, and may call nothing in its post-return
// (CanonicalABI.md, "Lifting and Lowering"). componentize-qjs drops them in post-return, which traps. Here its glue module
// drops them at the end of the function, and what post-return calls does nothing.
import fs from 'node:fs';
import { parse, print } from '@bytecodealliance/jco';

const file = process.argv[2];
const lines = (await print(fs.readFileSync(file))).split('\n');
const glue = lines.findIndex((l) => /^ +\(core module \$wit-dylib\.wasm/.test(l));
const elements = lines.findIndex((l, i) => i > glue && /^ +\(elem /.test(l));
const drops = lines[elements].match(/\$"\[resource-drop\][^"]+"/g); // by number of the resource

const ends = []; // lines to insert at: [line, text]
const borrowed = new Set();
let open = [];
for (let i = elements; i < lines.length && !/^ +\(core module /.test(lines[i]); i++) {
  if (/call \$wit_dylib_push_borrow$/.test(lines[i])) {
    const [, resource] = lines[i - 2].match(/i32\.const (\d+)/);
    open.push(`        ${lines[i - 1].trim()}\n        call ${drops[resource]}`);
    borrowed.add(drops[resource]);
  }
  if (/^ {6}\)$/.test(lines[i])) {
    if (open.length) ends.push([i, open.join('\n')]);
    open = [];
  }
}
for (const [at, text] of ends.reverse()) lines.splice(at, 0, text);
for (const name of borrowed) lines[elements] = lines[elements].replace(name, '$nothing');
lines.splice(elements, 0, '      (func $nothing (param i32))');
if (borrowed.size) fs.writeFileSync(file, await parse(lines.join('\n')));
