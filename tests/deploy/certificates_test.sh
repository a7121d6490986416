#!/usr/bin/env bash
# deploy/kubernetes/certificates.sh makes what is missing, keeps what is good, signs again what has ended or is about to, has other
# names, or does not belong to its key or authority, and says what it did and what openssl has against it.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
fail() { echo "FAILED: $*" >&2; cat log >&2; exit 1; }
certificates() { "$root/deploy/kubernetes/certificates.sh" "$@" >log 2>&1; }
says() { grep -qE -- "$1" log || fail "does not say: $1"; }
serial() { openssl x509 -in "tls/$1.crt" -noout -serial; }
addresses() { openssl x509 -in "tls/$1.crt" -noout -ext subjectAltName; }
good() {  # NAME: of its key, its authority, and for today
  openssl verify -CAfile tls/ca.crt "tls/$1.crt" >verify.log 2>&1 || fail "$1: $(cat verify.log)"
  [[ $(openssl x509 -in "tls/$1.crt" -noout -pubkey) == "$(openssl pkey -in "tls/$1.key" -pubout)" ]] || fail "$1 is of another key"
}

certificates tls gpu-01=10.0.3.11 gpu-02=fd00::2 || fail "exit code $?"
for name in coordinator admin nodes/gpu-01 nodes/gpu-02; do
  good "$name"
  says "^certificates: $name: signed, valid until .* \(new\)$"
done
cmp tls/ca.crt tls/nodes/ca.crt || fail "the nodes have another authority"
addresses nodes/gpu-01 | grep -q 'DNS:gpu-01, IP Address:10.0.3.11, URI:ringleader://node/gpu-01' || fail "names of gpu-01"

# Another node; the others stay, named again or not.
first=$(serial nodes/gpu-01) second=$(serial nodes/gpu-02)
certificates tls gpu-02=fd00::2 gpu-03=10.0.3.13 || fail "exit code $?"
for name in coordinator admin nodes/gpu-01 nodes/gpu-02; do says "^certificates: $name: kept, valid until "; done
says '^certificates: nodes/gpu-03: signed, .* \(new\)$'
[[ $(serial nodes/gpu-01) == "$first" && $(serial nodes/gpu-02) == "$second" ]] || fail "a good certificate was signed again"

# Another address.
certificates tls gpu-01=10.0.3.99 || fail "exit code $?"
says '^certificates: nodes/gpu-01: signed, .* \(its names were DNS:gpu-01,IP:10.0.3.11,'
addresses nodes/gpu-01 | grep -q 'IP Address:10.0.3.99,' || fail "gpu-01 keeps its address"
good nodes/gpu-01

# The coordinator's further names: kept by later calls, also by one that signs it again, and replaced by another list.
addresses coordinator | grep -q 'DNS:ringleader-coordinator.ringleader.svc, IP Address:127.0.0.1$' || fail "names of the coordinator"
certificates tls --coordinator head.example,10.0.3.1,fd00::1,localhost || fail "exit code $?"
says '^certificates: coordinator: signed, .* \(its names were DNS:localhost,'
says '^certificates: nodes/gpu-01: kept'
further='IP Address:127.0.0.1, DNS:head.example, IP Address:10.0.3.1, IP Address:FD00:0:0:0:0:0:0:1$'
addresses coordinator | grep -q "$further" || fail "further names of the coordinator"
certificates tls gpu-01=10.0.3.99 || fail "exit code $?"
says '^certificates: coordinator: kept'
cp tls/admin.key tls/coordinator.key
certificates tls || fail "exit code $?"
says '^certificates: coordinator: signed, .* \(it did not belong to its key\)$'
addresses coordinator | grep -q "$further" || fail "the coordinator lost its further names"
good coordinator
certificates tls gpu-01=10.0.3.99 --coordinator=head.example || fail "exit code $?"
addresses coordinator | grep -q 'IP Address:127.0.0.1, DNS:head.example$' || fail "the coordinator keeps names that were replaced"
cp tls/admin.crt tls/coordinator.crt
certificates tls || fail "exit code $?"
! addresses coordinator | grep -q URI || fail "the coordinator takes over a role"
first=$(serial coordinator)
for bad in 'head example' 'head.example,URI:ringleader://admin/x' 'a,,b' head_1; do
  if certificates tls --coordinator "$bad"; then fail "takes $bad"; fi
  says "^certificates: --coordinator: '.*' is neither a host's name nor an IP address"
done
if certificates tls --coordinator 10.0.3.999; then fail "takes a bad address"; fi
says '^certificates: coordinator .*: openssl says: '
if certificates tls --coordinator; then fail "takes no name"; fi
says 'certificates: --coordinator needs NAME or IP'
[[ $(serial coordinator) == "$first" ]] || fail "the coordinator's was replaced"

# The end is near: named or not, with the addresses that they have, in a number of days that can be set.
RINGLEADER_CERTIFICATE_DAYS=20 RINGLEADER_RENEW_DAYS=10 certificates short gpu-01=10.0.3.11 || fail "exit code $?"
RINGLEADER_RENEW_DAYS=19 certificates short || fail "exit code $?"
says '^certificates: nodes/gpu-01: kept'
mv tls long && mv short tls
certificates tls || fail "exit code $?"
for name in coordinator admin nodes/gpu-01; do
  says "^certificates: $name: signed, .* \(it would have ended on "
  openssl x509 -in "tls/$name.crt" -noout -checkend $((364 * 86400)) >/dev/null || fail "$name ends soon"
  good "$name"
done
addresses nodes/gpu-01 | grep -q 'IP Address:10.0.3.11,' || fail "gpu-01 lost its address"

# What the alert on an end that is near fires for is signed again, of however many days it is; what has twice that time left is not.
share=$(grep -A5 'alert: RingleaderCertificateExpires' "$root/deploy/prometheus/rules.yaml" | sed -n 's/^ *< \(0\.[0-9]*\) \* (.*/\1/p')
[[ $share ]] || fail "rules.yaml does not say at which share of a certificate's time the alert fires"
for days in 30 90 365; do
  left=$(awk "BEGIN {print int($share * $days) + 1}")
  RINGLEADER_CERTIFICATE_DAYS=$left RINGLEADER_RENEW_DAYS=0 certificates "expires-$days" || fail "exit code $?"
  RINGLEADER_CERTIFICATE_DAYS=$days certificates "expires-$days" || fail "exit code $?"
  says "^certificates: coordinator: signed, .* \(it would have ended on "
  RINGLEADER_CERTIFICATE_DAYS=$((2 * left)) RINGLEADER_RENEW_DAYS=0 certificates "lasts-$days" || fail "exit code $?"
  RINGLEADER_CERTIFICATE_DAYS=$days certificates "lasts-$days" || fail "exit code $?"
  says '^certificates: coordinator: kept'
done
for bad in 1.5 -1 030 x; do
  if RINGLEADER_CERTIFICATE_DAYS=$bad certificates tls; then fail "takes $bad days"; fi
  says "^certificates: .* is no number of days"
done

# One that has ended.
openssl req -new -key tls/nodes/gpu-01.key -subj /CN=gpu-01 -out csr
openssl x509 -req -days 0 -in csr -CA tls/ca.crt -CAkey tls/ca.key -extfile <(echo subjectAltName=IP:10.0.3.11) \
  -out tls/nodes/gpu-01.crt 2>openssl.log
sleep 1
certificates tls gpu-01=10.0.3.11 || fail "exit code $?"
says '^certificates: nodes/gpu-01: signed, .* \(it ended on '
good nodes/gpu-01

# Another's key, and another authority.
cp tls/admin.key tls/coordinator.key
cp long/admin.key long/admin.crt tls/
certificates tls || fail "exit code $?"
says '^certificates: coordinator: signed, .* \(it did not belong to its key\)$'
says '^certificates: admin: signed, .* \(another authority had signed it\)$'
good coordinator
good admin

# What cannot be signed says why, and leaves what is there.
first=$(serial nodes/gpu-01)
for bad in gpu-01=10.0.3.999 gpu-01=1:2; do
  if certificates tls "$bad"; then fail "takes $bad"; fi
  says '^certificates: nodes/gpu-01 .*: openssl says: '
  says 'bad ip address'
done
for bad in gpu-01=gpu-01.example 'gpu-01=10.0.3.11,URI:ringleader://admin/x' gpu-01; do
  if certificates tls "$bad"; then fail "takes $bad"; fi
  says "$bad is not NAME=IP"
done
if certificates tls ca=10.0.3.99; then fail "a node takes the authority's place"; fi
says 'a node cannot be called ca'
openssl x509 -in tls/nodes/ca.crt -noout -subject | grep -q 'Ringleader authority' || fail "the nodes' authority was replaced"
long=gke-training-$(printf 'a%.0s' {1..80})
certificates tls "$long=10.0.3.98" || fail "a node of a long name has no certificate"
openssl x509 -in "tls/nodes/$long.crt" -noout -ext subjectAltName | grep -q "URI:ringleader://node/$long" || fail "$long is not named"
[[ $(serial nodes/gpu-01) == "$first" ]] || fail "gpu-01 was replaced"
mv tls/ca.key elsewhere
if certificates tls; then fail "signs without the authority's key"; fi
says 'tls/ca.key is not there'
! compgen -G 'tls/.new.*' >/dev/null || fail "temporary files are left behind"
echo "PASSED"
