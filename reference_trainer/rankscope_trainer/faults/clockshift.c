/* Shifts the wall clock of this process, from the call of clockshift_set on.
 *
 * The calls of clock_gettime, gettimeofday and time in every object that is loaded go through a
 * table of addresses (the GOT). clockshift_set puts other functions into those tables, which add
 * `offset_ns`, and `ppm` millionths of the time since then, to what the kernel says. Monotonic
 * clocks stay true, so sleeps and timeouts work. Programs that ask the kernel themselves are not
 * reached, nor objects loaded later.
 */
#define _GNU_SOURCE
#include <elf.h>
#include <link.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__)
#define IS_ADDRESS(type) ((type) == R_X86_64_JUMP_SLOT || (type) == R_X86_64_GLOB_DAT)
#elif defined(__aarch64__)
#define IS_ADDRESS(type) ((type) == R_AARCH64_JUMP_SLOT || (type) == R_AARCH64_GLOB_DAT)
#else
#error "clockshift knows x86_64 and aarch64 only"
#endif

static const long long BILLION = 1000000000LL;
static long long offset_ns, since_ns;
static double ppm;

static long long true_ns(clockid_t clock) {
    struct timespec t;
    syscall(SYS_clock_gettime, clock, &t);
    return t.tv_sec * BILLION + t.tv_nsec;
}

static long long wall_ns(clockid_t clock) {
    double passed_ns = (double)(true_ns(CLOCK_MONOTONIC) - since_ns);
    return true_ns(clock) + offset_ns + (long long)(passed_ns * ppm * 1e-6);
}

static int shifted_clock_gettime(clockid_t clock, struct timespec *t) {
    if (clock != CLOCK_REALTIME && clock != CLOCK_REALTIME_COARSE && clock != CLOCK_TAI)
        return syscall(SYS_clock_gettime, clock, t);
    long long ns = wall_ns(clock);
    t->tv_sec = ns / BILLION;
    t->tv_nsec = ns % BILLION;
    return 0;
}

static int shifted_gettimeofday(struct timeval *t, void *zone) {
    (void)zone;
    long long ns = wall_ns(CLOCK_REALTIME);
    t->tv_sec = ns / BILLION;
    t->tv_usec = ns % BILLION / 1000;
    return 0;
}

static time_t shifted_time(time_t *t) {
    time_t seconds = wall_ns(CLOCK_REALTIME) / BILLION;
    if (t) *t = seconds;
    return seconds;
}

static void *replacement(const char *name) {
    if (!strcmp(name, "clock_gettime")) return (void *)shifted_clock_gettime;
    if (!strcmp(name, "gettimeofday")) return (void *)shifted_gettimeofday;
    if (!strcmp(name, "time")) return (void *)shifted_time;
    return 0;
}

static int replace(ElfW(Addr) base, const ElfW(Rela) *rela, size_t size, const ElfW(Sym) *symbols,
                   const char *names) {
    int replaced = 0;
    for (; size >= sizeof *rela; size -= sizeof *rela, rela++) {
        if (!IS_ADDRESS(ELF64_R_TYPE(rela->r_info))) continue;
        void *function = replacement(names + symbols[ELF64_R_SYM(rela->r_info)].st_name);
        if (!function) continue;
        void **slot = (void **)(base + rela->r_offset);
        long page = sysconf(_SC_PAGESIZE);
        void *start = (void *)((ElfW(Addr))slot & -page);
        if (mprotect(start, page, PROT_READ | PROT_WRITE)) continue;  /* read-only after loading */
        *slot = function;
        replaced++;
    }
    return replaced;
}

static int in_object(struct dl_phdr_info *object, size_t size, void *count) {
    const ElfW(Rela) *rela = 0, *calls = 0;
    const ElfW(Sym) *symbols = 0;
    const char *names = 0;
    size_t rela_size = 0, calls_size = 0;
    (void)size;
    if (strstr(object->dlpi_name, "vdso")) return 0;
    for (int i = 0; i < object->dlpi_phnum; i++) {
        if (object->dlpi_phdr[i].p_type != PT_DYNAMIC) continue;
        const ElfW(Dyn) *d = (void *)(object->dlpi_addr + object->dlpi_phdr[i].p_vaddr);
        for (; d->d_tag != DT_NULL; d++) {
            switch (d->d_tag) {
            case DT_SYMTAB: symbols = (void *)d->d_un.d_ptr; break;
            case DT_STRTAB: names = (void *)d->d_un.d_ptr; break;
            case DT_RELA: rela = (void *)d->d_un.d_ptr; break;
            case DT_RELASZ: rela_size = d->d_un.d_val; break;
            case DT_JMPREL: calls = (void *)d->d_un.d_ptr; break;
            case DT_PLTRELSZ: calls_size = d->d_un.d_val; break;
            }
        }
    }
    if (!symbols || !names) return 0;
    *(int *)count += replace(object->dlpi_addr, rela, rela ? rela_size : 0, symbols, names);
    *(int *)count += replace(object->dlpi_addr, calls, calls ? calls_size : 0, symbols, names);
    return 0;
}

/* Returns how many addresses lead to the shifted clock; 0: there was nothing to replace. */
int clockshift_set(long long set_offset_ns, double set_ppm) {
    static int count;
    offset_ns = set_offset_ns;
    ppm = set_ppm;
    since_ns = true_ns(CLOCK_MONOTONIC);
    if (!count) dl_iterate_phdr(in_object, &count);
    return count;
}
