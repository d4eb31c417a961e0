// component.mjs WIT WORLD CORE.wasm OUT.wasm: makes a component of a core module that implements the canonical ABI.
// WIT is a file as `tripod wit gen` writes it. A module that uses WASI preview 1 gets jco's adapter, which hosts with
// their own preview 1 do not use.
import fs from 'node:fs';
import { componentEmbed, componentNew } from '@bytecodealliance/jco';

const [wit, world, core, out] = process.argv.slice(2);
const binary = fs.readFileSync(core);
const embedded = await componentEmbed({ binary, world, stringEncoding: 'utf8', witSource: fs.readFileSync(wit, 'utf8') });
const preview1 = WebAssembly.Module.imports(new WebAssembly.Module(binary)).some((i) => i.module === 'wasi_snapshot_preview1');
const adapter = new URL('node_modules/@bytecodealliance/jco/lib/wasi_snapshot_preview1.reactor.wasm', import.meta.url);
fs.writeFileSync(out, await componentNew(embedded, preview1 ? [['wasi_snapshot_preview1', fs.readFileSync(adapter)]] : []));
