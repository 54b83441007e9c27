#!/bin/sh
# Installs the program from the archive of scripts/package.sh in a Debian image: the steps of Dockerfile.cpu and Dockerfile.cuda.
# `scripts/release-check.sh chroot` runs them in a chroot.
# Usage: install.sh PACKAGES      PACKAGES is the directory of the archive
set -eu
archive=$(echo "$1"/moe-analyze-*-"$(uname -m)"-unknown-linux-gnu.tar.xz)
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -qq -o Dpkg::Use-Pty=0 --no-install-recommends libgcc-s1 xz-utils
(cd "$1" && grep " ${archive##*/}\$" SHA256SUMS | sha256sum --check --strict)
tar --extract --xz --file "$archive" --strip-components 1 --no-same-owner --directory /usr/local
useradd --create-home --uid 1000 moe
install --directory --owner moe --group moe /data
apt-get purge -qq -o Dpkg::Use-Pty=0 --auto-remove xz-utils
rm -rf /var/lib/apt/lists/*
moe-analyze --version
