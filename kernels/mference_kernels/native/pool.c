/* Worker threads. A job is open while its items are handed out; late workers find it closed and nobody waits for them, so a
   core lost to another process delays a call by at most the items a preempted worker had already taken. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <time.h>

#include "mference.h"

#define MAX_THREADS 256
#define OPEN 0x40000000u
#define SPIN_NS 50000 /* then sleep: spinning longer takes the core from whoever could use it */

static pthread_mutex_t calls = PTHREAD_MUTEX_INITIALIZER; /* held by the one call that uses the pool */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t work = PTHREAD_COND_INITIALIZER, idle = PTHREAD_COND_INITIALIZER;
static atomic_uint generation; /* jobs opened so far */
static atomic_uint state;      /* OPEN, plus the number of workers inside the job */
static atomic_uint sleepers, waiting;
static _Atomic int64_t next_item;
static mf_task job;
static void *job_context;
static int64_t job_items;
static int started = 1;        /* threads, the calling one included */
static atomic_int wanted = 1; /* of these take part */

static void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

#if defined(__linux__)
/* The system wakes a worker on the core of who woke it, and where cores share no cache it may leave both there beside an
   idle one. So each worker keeps to a core of its own, counted from the caller's. */
static int cores[CPU_SETSIZE], place_of[CPU_SETSIZE], core_count;
static atomic_int caller_core;

static void know_cores(void) {
    cpu_set_t allowed;
    core_count = 0;
    if (sched_getaffinity(0, sizeof allowed, &allowed)) return;
    for (int core = 0; core < CPU_SETSIZE; core++)
        if (CPU_ISSET(core, &allowed)) {
            place_of[core] = core_count;
            cores[core_count++] = core;
        }
}

static void note_core(void) { atomic_store_explicit(&caller_core, sched_getcpu(), memory_order_relaxed); }

static void keep_apart(int number, int *core) {
    const int caller = atomic_load_explicit(&caller_core, memory_order_relaxed);
    if (core_count < 2 || caller < 0 || caller >= CPU_SETSIZE) return;
    const int own = cores[(place_of[caller] + number) % core_count];
    if (own == *core) return;
    cpu_set_t only;
    CPU_ZERO(&only);
    CPU_SET(own, &only);
    if (!pthread_setaffinity_np(pthread_self(), sizeof only, &only)) *core = own;
}
#else
static void know_cores(void) {}
static void note_core(void) {}
static void keep_apart(int number, int *core) { (void)number, (void)core; }
#endif

static void take_items(int number) {
    int64_t item;
    while ((item = atomic_fetch_add(&next_item, 1)) < job_items) job(job_context, item, number);
}

static int spin_until_changed(atomic_uint *word, unsigned seen) {
    const int64_t until = now_ns() + SPIN_NS;
    do {
        for (int i = 0; i < 64; i++) {
            if (atomic_load(word) != seen) return 1;
            relax();
        }
        sched_yield(); /* whoever waits for this core goes first: the caller's own threads, above all */
    } while (now_ns() < until);
    return 0;
}

static unsigned await_job(unsigned seen) {
    if (!spin_until_changed(&generation, seen)) {
        pthread_mutex_lock(&lock);
        atomic_fetch_add(&sleepers, 1);
        while (atomic_load(&generation) == seen) pthread_cond_wait(&work, &lock);
        atomic_fetch_sub(&sleepers, 1);
        pthread_mutex_unlock(&lock);
    }
    return atomic_load(&generation);
}

static void leave_job(void) {
    if (atomic_fetch_sub(&state, 1) == 1 && atomic_load(&waiting)) {
        pthread_mutex_lock(&lock);
        pthread_cond_broadcast(&idle);
        pthread_mutex_unlock(&lock);
    }
}

static void *worker(void *argument) {
    const int number = (int)(intptr_t)argument;
    unsigned seen = 0;
    int core = -1;
    for (;;) {
        seen = await_job(seen);
        keep_apart(number, &core);
        unsigned inside = atomic_load(&state);
        while ((inside & OPEN) && number < wanted)
            if (atomic_compare_exchange_weak(&state, &inside, inside + 1)) {
                take_items(number);
                leave_job();
                break;
            }
    }
    return NULL;
}

/* A child process has no workers: it makes its own at its first call. */
static void forget_workers(void) {
    static const pthread_mutex_t fresh_lock = PTHREAD_MUTEX_INITIALIZER;
    static const pthread_cond_t fresh_condition = PTHREAD_COND_INITIALIZER;
    memcpy(&calls, &fresh_lock, sizeof calls);
    memcpy(&lock, &fresh_lock, sizeof lock);
    memcpy(&work, &fresh_condition, sizeof work);
    memcpy(&idle, &fresh_condition, sizeof idle);
    atomic_store(&state, 0);
    atomic_store(&sleepers, 0);
    atomic_store(&waiting, 0);
    started = 1;
}

static void start_workers(void) {
    static int registered;
    if (!registered) registered = pthread_atfork(NULL, NULL, forget_workers) == 0;
    if (started < wanted) know_cores();
    while (started < wanted && registered) {
        pthread_t thread;
        pthread_attr_t attributes;
        if (pthread_attr_init(&attributes)) return;
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        sigset_t all, old; /* signals belong to the interpreter's threads */
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &old);
        const int failed = pthread_create(&thread, &attributes, worker, (void *)(intptr_t)started);
        pthread_sigmask(SIG_SETMASK, &old, NULL);
        pthread_attr_destroy(&attributes);
        if (failed) return; /* fewer threads, same result */
        started++;
    }
}

void mf_pool_enter(void) {
    pthread_mutex_lock(&calls);
    start_workers();
}

void mf_pool_leave(void) { pthread_mutex_unlock(&calls); }

int mf_pool_threads(void) { return wanted; }

void mf_pool_run(mf_task task, void *context, int64_t items) {
    if (wanted < 2 || started < 2 || items < 2) {
        for (int64_t item = 0; item < items; item++) task(context, item, 0);
        return;
    }
    job = task;
    job_context = context;
    job_items = items;
    note_core();
    atomic_store(&next_item, 0);
    atomic_store(&state, OPEN);
    atomic_fetch_add(&generation, 1);
    if (atomic_load(&sleepers)) {
        pthread_mutex_lock(&lock);
        pthread_cond_broadcast(&work);
        pthread_mutex_unlock(&lock);
    }
    take_items(0);
    unsigned inside = atomic_fetch_and(&state, ~OPEN) & ~OPEN;
    while (inside) {
        if (!spin_until_changed(&state, inside)) {
            pthread_mutex_lock(&lock);
            atomic_store(&waiting, 1);
            while (atomic_load(&state)) pthread_cond_wait(&idle, &lock);
            atomic_store(&waiting, 0);
            pthread_mutex_unlock(&lock);
        }
        inside = atomic_load(&state);
    }
}

MF_EXPORT int mf_set_threads(int threads) {
    pthread_mutex_lock(&calls);
    wanted = threads < 1 ? 1 : threads > MAX_THREADS ? MAX_THREADS : threads;
    pthread_mutex_unlock(&calls);
    return wanted;
}
