// component.mjs WIT WORLD CORE.wasm OUT.wasm: makes a component of a core module that speaks the canonical ABI.
// WIT is a file, or a directory as `tripod wit gen` writes it. A module that uses WASI preview 1 gets jco's adapter,
// which hosts that serve preview 1 themselves leave out.
import fs from 'node:fs';
import path from 'node:path';
import { componentEmbed, componentNew } from '@bytecodealliance/jco';

// jco takes WIT as one text only: the packages of deps/ are nested in it.
function source(wit) {
  if (!fs.statSync(wit).isDirectory()) return fs.readFileSync(wit, 'utf8');
  const files = fs.readdirSync(wit, { recursive: true }).filter((f) => f.endsWith('.wit')).sort();
  const text = (f) => fs.readFileSync(path.join(wit, f), 'utf8');
  const nested = (f) => text(f).replace(/^package ([^;]+);/m, 'package $1 {') + '}\n';
  return [...files.filter((f) => !f.includes('/')).map(text), ...files.filter((f) => f.includes('/')).map(nested)].join('\n');
}

const [wit, world, core, out] = process.argv.slice(2);
const binary = fs.readFileSync(core);
const embedded = await componentEmbed({ binary, world, stringEncoding: 'utf8', witSource: source(wit) });
const preview1 = WebAssembly.Module.imports(new WebAssembly.Module(binary)).some((i) => i.module === 'wasi_snapshot_preview1');
const adapter = `${import.meta.dirname}/node_modules/@bytecodealliance/jco/lib/wasi_snapshot_preview1.reactor.wasm`;
fs.writeFileSync(out, await componentNew(embedded, preview1 ? [['wasi_snapshot_preview1', fs.readFileSync(adapter)]] : []));
