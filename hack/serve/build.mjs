// build.mjs SOURCE WIT OUTPUT: make a component of a server in JavaScript.
import { componentize } from "@bytecodealliance/componentize-js";
import { writeFile } from "node:fs/promises";
import { resolve } from "node:path";

const [source, wit, output] = process.argv.slice(2);
const { component } = await componentize({ sourcePath: resolve(source), witPath: resolve(wit), worldName: "hello" });
await writeFile(output, component);
