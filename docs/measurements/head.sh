# Sourced by the measurements: prints date, machine, program and NOTE. COMMIT replaces git. Needs `moe_analyze`, the path of the program.

echo "date       $(date -u +%F)"
echo "machine    $(lscpu | sed -n 's/^Model name: *//p' | head -1), $(nproc) CPUs, $(uname -sr)"
echo "load       $(cut -d' ' -f1-3 /proc/loadavg)"
echo "program    $("$moe_analyze" --version), commit ${COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || echo unknown)}"
[ -z "${NOTE:-}" ] || echo "note       $NOTE"
