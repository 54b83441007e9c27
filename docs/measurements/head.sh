# Sourced by the measurements: when, on which machine and with which program, and NOTE; COMMIT where there is no git. Wants `moe_analyze`, the program's path.

echo "date       $(date -u +%F)"
echo "machine    $(lscpu | sed -n 's/^Model name: *//p' | head -1), $(nproc) CPUs, $(uname -sr)"
echo "load       $(cut -d' ' -f1-3 /proc/loadavg)"
echo "program    $("$moe_analyze" --version), commit ${COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || echo unknown)}"
[ -z "${NOTE:-}" ] || echo "note       $NOTE"
