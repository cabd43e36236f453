/* Moves the wall clock of one process by the seconds that stand in a file; monotonic time stays.
   cc -shared -fPIC -o clock_step.so clock_step.c -ldl
   CLOCK_STEP_FILE=FILE LD_PRELOAD=clock_step.so PROGRAM */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *step;
static int (*real_clock_gettime)(clockid_t, struct timespec *);

__attribute__((constructor)) static void start(void) {
  real_clock_gettime = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
  const char *name = getenv("CLOCK_STEP_FILE");
  int file = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
  if (file < 0) return;
  void *page = mmap(NULL, sizeof *step, PROT_READ, MAP_SHARED, file, 0);
  close(file);
  if (page != MAP_FAILED) step = page;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  if (!real_clock_gettime) start();
  int code = real_clock_gettime(clock, now);
  if (code == 0 && step && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
    now->tv_sec += *step;
  return code;
}

int gettimeofday(struct timeval *now, void *zone) {
  struct timespec precise;
  (void)zone;
  int code = clock_gettime(CLOCK_REALTIME, &precise);
  now->tv_sec = precise.tv_sec;
  now->tv_usec = precise.tv_nsec / 1000;
  return code;
}

time_t time(time_t *out) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (out) *out = now.tv_sec;
  return now.tv_sec;
}
