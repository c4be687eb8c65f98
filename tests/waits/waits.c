// Preloaded into a rank: writes down when its main thread slept on a condition variable of C++.
//
// Every wait of PyTorch for a collective on the CPU is one: of a work, of a future, of gloo. What
// Python itself waits for (its interpreter lock, its queues) is left out by who calls.
//
//   WAITS=folder LD_PRELOAD=waits.so python ...      one file a process: when a sleep began and ended,
//                                                    CLOCK_MONOTONIC ns, and for how long the thread
//                                                    could run until then and had no processor, ns
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { MOST_CALLERS = 256 };

static int file_of_process(void) {
  static int file = -2;
  static pid_t owner;
  if (file == -2 || owner != getpid()) {
    char path[4096];
    const char *folder = getenv("WAITS");
    owner = getpid();
    snprintf(path, sizeof path, "%s/%d", folder ? folder : "", (int)owner);
    file = folder ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644) : -1;
  }
  return file;
}

// 0 where the kernel does not tell.
static uint64_t without_processor_ns(void) {
  static int file = -2;
  static pid_t owner;
  char text[128];
  if (file == -2 || owner != getpid()) {
    owner = getpid();
    snprintf(text, sizeof text, "/proc/self/task/%d/schedstat", (int)owner);
    file = open(text, O_RDONLY | O_CLOEXEC);
  }
  const ssize_t count = file < 0 ? -1 : pread(file, text, sizeof text - 1, 0);
  unsigned long long ran = 0, waited = 0;
  text[count > 0 ? count : 0] = 0;
  return sscanf(text, "%llu %llu", &ran, &waited) == 2 ? waited : 0;
}

// Only the main thread asks, so there is no race.
static int is_python(void *caller) {
  static struct { void *address; int answer; } known[MOST_CALLERS];
  static int count;
  for (int at = 0; at < count; ++at)
    if (known[at].address == caller) return known[at].answer;
  Dl_info where;
  const char *slash, *name = dladdr(caller, &where) && where.dli_fname ? where.dli_fname : "";
  if ((slash = strrchr(name, '/'))) name = slash + 1;
  const int answer = strncmp(name, "python", 6) == 0 || strncmp(name, "libpython", 9) == 0 ||
      strncmp(name, "_queue", 6) == 0;
  if (count < MOST_CALLERS) {
    known[count].address = caller;
    known[count++].answer = answer;
  }
  return answer;
}

static uint64_t now_ns(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static int is_watched(void *caller) {
  return syscall(SYS_gettid) == getpid() && !is_python(caller);
}

static void slept(uint64_t began) {
  const uint64_t row[3] = {began, now_ns(), without_processor_ns()};
  const int file = file_of_process();
  if (file >= 0 && write(file, row, sizeof row) < 0) _exit(99);
}

#define TIMED(call)                                               \
  if (!is_watched(__builtin_return_address(0))) return call;      \
  const uint64_t began = now_ns();                                \
  const int code = call;                                          \
  slept(began);                                                   \
  return code;

int pthread_cond_wait(pthread_cond_t *condition, pthread_mutex_t *mutex) {
  static int (*real)(pthread_cond_t *, pthread_mutex_t *);
  if (!real) real = dlsym(RTLD_NEXT, "pthread_cond_wait");
  TIMED(real(condition, mutex))
}

int pthread_cond_timedwait(
    pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *until) {
  static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
  TIMED(real(condition, mutex, until))
}

int pthread_cond_clockwait(
    pthread_cond_t *condition, pthread_mutex_t *mutex, clockid_t clock,
    const struct timespec *until) {
  static int (*real)(pthread_cond_t *, pthread_mutex_t *, clockid_t, const struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "pthread_cond_clockwait");
  TIMED(real(condition, mutex, clock, until))
}
