#!/bin/sh
# Lays out the root of an image without a distribution: programs, the libraries they name, the
# loader, certificate authorities and one user. No shell, no package manager.
# Usage: root.sh DESTINATION PROGRAM...
set -eu
destination=$1
shift
mkdir -p "$destination/usr/bin" "$destination/etc/ssl/certs" "$destination/tmp"
chmod 1777 "$destination/tmp"
for program in "$@"; do
  cp -L "$program" "$destination/usr/bin/"
  # `ldd` names the loader too, by its path alone
  ldd "$program" | grep -o '/[^ ]*' | sort -u | while read -r library; do
    mkdir -p "$destination$(dirname "$library")"
    cp -L "$library" "$destination$library"
  done
done
cp -L /etc/ssl/certs/ca-certificates.crt "$destination/etc/ssl/certs/"
echo 'm3stack:x:10001:10001::/tmp:/sbin/nologin' >"$destination/etc/passwd"
echo 'm3stack:x:10001:' >"$destination/etc/group"
echo 'hosts: files dns' >"$destination/etc/nsswitch.conf"
