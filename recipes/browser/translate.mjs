// Translates lines of standard input with the model in a folder, as a page does:
//
//   node translate.mjs FOLDER < INPUT > OUTPUT
import {readFile} from "node:fs/promises";
import {join} from "node:path";
import {text} from "node:stream/consumers";
import {BatchTranslator, TranslatorBacking} from "@browsermt/bergamot-translator/translator.js";

const [, , folder] = process.argv;
if (folder === undefined) {
  console.error("error: usage: node translate.mjs FOLDER < INPUT > OUTPUT");
  process.exit(2);
}

class Folder extends TranslatorBacking {
  async loadModelRegistery() {
    const registry = JSON.parse(await readFile(join(folder, "registry.json"), "utf-8"));
    return Object.entries(registry).map(([pair, files]) => ({from: pair.slice(0, 2), to: pair.slice(2, 4), files}));
  }

  async fetch(name) {
    const {buffer, byteOffset, byteLength} = await readFile(join(folder, name));
    return buffer.slice(byteOffset, byteOffset + byteLength);
  }
}

const options = {pivotLanguage: null};
const backing = new Folder(options);
backing.onerror = error => { throw error; };
const [{from, to}] = await backing.registry;
const translator = new BatchTranslator(options, backing);
const translate = async line => (await translator.translate({from, to, text: line})).target.text;
await translate(".");  // loads the model
const lines = (await text(process.stdin)).replace(/\n$/, "").split("\n");
const start = performance.now();
const translations = await Promise.all(lines.map(translate));
console.error(`${(lines.length * 1000 / (performance.now() - start)).toFixed(1)} lines/s`);
console.log(translations.map(line => line.replaceAll("\n", " ")).join("\n"));
await translator.delete();
