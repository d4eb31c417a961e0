// component.mjs WORLD CORE.wasm OUT.wasm WIT...: makes a command component of a core module. The WIT files are packages; the
// first contains the world. It needs build/wasm-tools (examples/wasm/build.sh).
import fs from 'node:fs';
import { componentEmbed, componentNew } from '@bytecodealliance/jco';

const [world, core, out, first, ...others] = process.argv.slice(2);
const nested = others.map((f) => fs.readFileSync(f, 'utf8').replace(/^package (.*);$/m, 'package $1 {') + '}\n');
const witSource = [fs.readFileSync(first, 'utf8'), ...nested].join('\n');
const binary = fs.readFileSync(core);
const embedded = await componentEmbed({ binary, world, stringEncoding: 'utf8', witSource });
const command = WebAssembly.Module.exports(new WebAssembly.Module(binary)).some((e) => e.name === '_start');
const lib = new URL('node_modules/@bytecodealliance/jco/lib/', import.meta.url);
const adapter = fs.readFileSync(new URL(`wasi_snapshot_preview1.${command ? 'command' : 'reactor'}.wasm`, lib));
fs.writeFileSync(out, await componentNew(embedded, [['wasi_snapshot_preview1', adapter]]));
