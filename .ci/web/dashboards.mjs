// Checks deploy/grafana against the types that Grafana itself publishes.
import { spawnSync } from 'node:child_process';
import { mkdirSync, readdirSync, readFileSync, writeFileSync } from 'node:fs';

const FOLDER = new URL('../../deploy/grafana/', import.meta.url);
const CACHE = new URL('./node_modules/.dashboards/', import.meta.url);

// JSON has the values of enums, where the types ask for their names.
const HEAD = `
import type { Dashboard } from '@grafana/schema';
type Json<T> = T extends string ? \`\${T}\` : T extends object ? { [K in keyof T]: Json<T[K]> } : T;
`;

mkdirSync(CACHE, { recursive: true });
const files = readdirSync(FOLDER).filter((name) => name.endsWith('.json'));
if (files.length === 0) throw new Error('no dashboard in deploy/grafana');
for (const name of files) {
  const text = readFileSync(new URL(name, FOLDER), 'utf8');
  writeFileSync(new URL(`${name}.ts`, CACHE), `${HEAD}export const shown: Json<Dashboard> = ${text};\n`);
}
const paths = files.map((name) => new URL(`${name}.ts`, CACHE).pathname);
const options = '--noEmit --strict --skipLibCheck --module nodenext --moduleResolution nodenext'.split(' ');
const tsc = new URL('./node_modules/.bin/tsc', import.meta.url).pathname;
process.exit(spawnSync(tsc, [...options, ...paths], { stdio: 'inherit' }).status ?? 1);
