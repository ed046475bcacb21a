// Verifies a Sigstore bundle with the libraries of the Sigstore project, offline, with one key.
// Usage: node verify.mjs BUNDLE.json KEY.pem FINGERPRINT   (prints the payload's predicate type)
import { createPublicKey } from 'node:crypto';
import { readFileSync } from 'node:fs';
import { bundleFromJSON } from '@sigstore/bundle';
import { toSignedEntity, Verifier } from '@sigstore/verify';

const [bundlePath, keyPath, fingerprint] = process.argv.slice(2);
const key = createPublicKey(readFileSync(keyPath));
const bundle = bundleFromJSON(JSON.parse(readFileSync(bundlePath, 'utf8')));
const trust = {
  certificateAuthorities: [],
  timestampAuthorities: [],
  tlogs: [],
  ctlogs: [],
  publicKey: (hint) => {
    if (hint !== fingerprint) throw new Error(`unknown key ${hint}`);
    return { publicKey: key, validFor: () => true };
  },
};
const offline = { tlogThreshold: 0, ctlogThreshold: 0, tsaThreshold: 0 };
new Verifier(trust, offline).verify(toSignedEntity(bundle));
const statement = JSON.parse(bundle.content.dsseEnvelope.payload.toString());
console.log(statement.predicateType);
