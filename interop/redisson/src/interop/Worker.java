package interop;

import com.google.gson.Gson;
import com.google.gson.JsonObject;
import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.concurrent.atomic.AtomicLongArray;
import java.util.stream.Stream;
import org.redisson.Redisson;
import org.redisson.api.RCountDownLatch;
import org.redisson.api.RLock;
import org.redisson.api.RPermitExpirableSemaphore;
import org.redisson.api.RRateLimiter;
import org.redisson.api.RReadWriteLock;
import org.redisson.api.RSemaphore;
import org.redisson.api.RateIntervalUnit;
import org.redisson.api.RateType;
import org.redisson.api.RedissonClient;
import org.redisson.config.Config;

/**
 * Does the tasks that the benchmarks of redlatch measure, with Redisson: what benchmarks/compare/worker.go does with
 * libraries in Go. It reads a task as a line, warms up, prints "ready", begins with the next line, prints what has come
 * of it, and goes on with the next task unless it says that it is spent.
 */
public final class Worker {
  private static final int SUB_BITS = 6; // see hist.go
  private static final int BUCKETS = (42 - SUB_BITS) << SUB_BITS;
  private static final long PATIENCE = TimeUnit.SECONDS.toNanos(2); // with those who wait when the time is over
  private static final long SETTLING = TimeUnit.MILLISECONDS.toNanos(300); // see latch.go

  private static final long LEASE_SECONDS = 30; // see peers_redis.go

  private static final Gson GSON = new Gson();
  private static final Map<String, RedissonClient> CLIENTS = new HashMap<>();

  private final JsonObject task;
  private final List<RedissonClient> clients = new ArrayList<>();
  /** Some threads still wait, and nothing else should be measured beside them. */
  private boolean spent;

  private Worker(JsonObject task) {
    this.task = task;
    task.getAsJsonArray("addrs").forEach(addr -> clients.add(client("", addr.getAsString())));
  }

  /** Returns a client of a server, of which it has one for each purpose. */
  private static RedissonClient client(String purpose, String addr) {
    return CLIENTS.computeIfAbsent(
        purpose + addr,
        key -> {
          Config config = new Config();
          config.useSingleServer().setAddress("redis://" + addr);
          return Redisson.create(config);
        });
  }

  public static void main(String[] args) throws Exception {
    PrintStream out = new PrintStream(System.out, true, StandardCharsets.UTF_8);
    System.setOut(System.err);
    BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
    // The compiler of the virtual machine wants more of a warm-up than the time of a measurement: above all at first, and
    // again for each kind of object, and when there is contention.
    Set<List<String>> warm = new HashSet<>();
    boolean spent = false;
    for (String line = in.readLine(); line != null && !spent; line = in.readLine()) {
      Worker worker = new Worker(GSON.fromJson(line, JsonObject.class));
      boolean first = warm.isEmpty();
      boolean known = !warm.add(Stream.of("do", "kind", "own").map(of -> worker.task.get(of).getAsString()).toList());
      long seconds = known ? 1 : first ? 10 : 5;
      try {
        worker.work(Math.max(worker.nanos("for"), TimeUnit.SECONDS.toNanos(seconds)), "-warm", false);
        out.println("ready");
        if (in.readLine() == null) {
          throw new IOException("nobody says that it begins");
        }
        Map<String, Object> outcome = worker.work(worker.nanos("for"), "", worker.task.get("trace").getAsBoolean());
        spent = worker.spent;
        outcome.put("spent", spent);
        out.println(GSON.toJson(outcome));
      } catch (Exception e) {
        out.println("failed: " + e.toString().replace('\n', ' '));
      }
    }
    Runtime.getRuntime().halt(0);
  }

  private Map<String, Object> work(long nanos, String suffix, boolean trace) throws Exception {
    String name = task.get("name").getAsString() + suffix;
    switch (task.get("do").getAsString()) {
      case "repeat":
        return measure(nanos, name, trace);
      case "latch":
        return latches(nanos, name);
      default:
        throw new IllegalArgumentException("Redisson does not " + task.get("do"));
    }
  }

  private long nanos(String name) {
    return task.get(name).getAsLong();
  }

  private interface Operation {
    void acquire() throws Exception;

    void release();
  }

  private Operation operation(String name, int thread) {
    RedissonClient client = clients.get(0);
    if (task.get("own").getAsBoolean()) {
      name += "-" + ProcessHandle.current().pid() + "-" + thread;
    }
    switch (task.get("kind").getAsString()) {
      case "lock":
        return of(client.getLock(name));
      case "fair":
        return of(client.getFairLock(name));
      case "rw":
        RReadWriteLock both = client.getReadWriteLock(name);
        Operation read = of(both.readLock());
        Operation write = of(both.writeLock());
        int writes = task.get("writes").getAsInt();
        return new Operation() {
          private Operation last;

          @Override
          public void acquire() throws Exception {
            last = ThreadLocalRandom.current().nextInt(100) < writes ? write : read;
            last.acquire();
          }

          @Override
          public void release() {
            last.release();
          }
        };
      case "semaphore":
        RSemaphore semaphore = client.getSemaphore(name);
        semaphore.trySetPermits(task.get("permits").getAsInt());
        return new Operation() {
          @Override
          public void acquire() throws InterruptedException {
            semaphore.acquire();
          }

          @Override
          public void release() {
            semaphore.release();
          }
        };
      case "permit":
        RPermitExpirableSemaphore leased = client.getPermitExpirableSemaphore(name);
        leased.trySetPermits(task.get("permits").getAsInt());
        return new Operation() {
          private String id;

          @Override
          public void acquire() throws InterruptedException {
            id = leased.acquire(LEASE_SECONDS, TimeUnit.SECONDS);
          }

          @Override
          public void release() {
            leased.release(id);
          }
        };
      case "rate": // see peers_rate.go
        RRateLimiter limiter = client.getRateLimiter(name);
        limiter.trySetRate(RateType.OVERALL, task.get("permits").getAsInt(), 100, RateIntervalUnit.MILLISECONDS);
        return new Operation() {
          @Override
          public void acquire() {
            limiter.acquire();
          }

          @Override
          public void release() {}
        };
      case "red":
        String of = name;
        return of(client.getRedLock(clients.stream().map(c -> c.getLock(of)).toArray(RLock[]::new)));
      default:
        throw new IllegalArgumentException("Redisson has no " + task.get("kind"));
    }
  }

  private static Operation of(RLock lock) {
    return new Operation() {
      @Override
      public void acquire() {
        lock.lock();
      }

      @Override
      public void release() {
        lock.unlock();
      }
    };
  }

  /** What one thread has done. */
  private final class Contender {
    final Operation operation;
    final int[] counts = new int[BUCKETS];
    final List<Long> got = new ArrayList<>();
    final List<Long> gave = new ArrayList<>();
    int done;
    int failed;
    String failure = "";
    volatile long started;
    volatile long ended;

    Contender(String name, int thread) {
      operation = operation(name, thread);
    }

    void run(AtomicBoolean over, boolean trace) {
      long hold = nanos("hold");
      long rest = nanos("rest");
      while (!over.get() && failed < 3) {
        started = System.nanoTime();
        try {
          operation.acquire();
          if (trace) {
            got.add(System.nanoTime());
          }
          TimeUnit.NANOSECONDS.sleep(hold);
          if (trace) {
            gave.add(System.nanoTime());
          }
          operation.release();
          ended = System.nanoTime();
          counts[bucketOf(ended - started - hold)]++;
          done++;
          TimeUnit.NANOSECONDS.sleep(rest);
        } catch (Exception e) {
          failed++;
          failure = failure.isEmpty() ? e.toString() : failure;
        }
      }
    }
  }

  private static int bucketOf(long nanos) {
    long v = Math.max(nanos, 0);
    int shift = Math.max(64 - Long.numberOfLeadingZeros(v) - SUB_BITS - 1, 0);
    return Math.min((shift << SUB_BITS) + (int) (v >> shift), BUCKETS - 1);
  }

  private Map<String, Object> measure(long nanos, String name, boolean trace) throws InterruptedException {
    AtomicBoolean over = new AtomicBoolean();
    List<Contender> contenders = new ArrayList<>();
    List<Thread> threads = new ArrayList<>();
    CountDownLatch begin = new CountDownLatch(1);
    for (int i = 0; i < task.get("goroutines").getAsInt(); i++) {
      Contender contender = new Contender(name, i);
      contenders.add(contender);
      Thread thread =
          new Thread(
              () -> {
                try {
                  begin.await();
                } catch (InterruptedException e) {
                  return;
                }
                contender.run(over, trace);
              });
      thread.start();
      threads.add(thread);
    }
    long started = System.nanoTime();
    begin.countDown();
    TimeUnit.NANOSECONDS.sleep(nanos);
    over.set(true);
    long until = System.nanoTime() + PATIENCE;
    for (int i = 0; i < threads.size(); i++) {
      // A waiter cannot be called off without harm to others. One that is left behind has waited for so long at least.
      threads.get(i).join(Math.max(1, TimeUnit.NANOSECONDS.toMillis(until - System.nanoTime())));
      if (threads.get(i).isAlive()) {
        spent = true;
        contenders.get(i).counts[bucketOf(System.nanoTime() - contenders.get(i).started)]++;
      }
    }
    Map<String, Object> outcome = new HashMap<>();
    outcome.put("elapsed", Math.max(nanos, contenders.stream().mapToLong(c -> c.ended).max().orElse(0) - started));
    Map<Integer, Integer> latency = new HashMap<>();
    List<Integer> shares = new ArrayList<>();
    List<Long> got = new ArrayList<>();
    List<Long> gave = new ArrayList<>();
    int failed = 0;
    String failure = "";
    for (Contender c : contenders) {
      for (int i = 0; i < BUCKETS; i++) {
        if (c.counts[i] > 0) {
          latency.merge(i, c.counts[i], Integer::sum);
        }
      }
      shares.add(c.done);
      got.addAll(c.got);
      gave.addAll(c.gave);
      failed += c.failed;
      failure = failure.isEmpty() ? c.failure : failure;
    }
    outcome.put("latency", latency);
    outcome.put("shares", shares);
    outcome.put("got", got);
    outcome.put("gave", gave);
    outcome.put("failed", failed);
    outcome.put("failure", failure);
    return outcome;
  }

  /** What latches in latch.go does. */
  private Map<String, Object> latches(long nanos, String name) throws Exception {
    RedissonClient counting = client("counting ", task.getAsJsonArray("addrs").get(0).getAsString());
    int waiters = task.get("goroutines").getAsInt();
    Map<Integer, Integer> wake = new HashMap<>();
    Map<Integer, Integer> last = new HashMap<>();
    int rounds = 0;
    long begin = System.nanoTime();
    for (; rounds == 0 || System.nanoTime() - begin < nanos; rounds++) {
      RCountDownLatch waiting = clients.get(0).getCountDownLatch(name);
      RCountDownLatch latch = counting.getCountDownLatch(name);
      if (!latch.trySetCount(1)) {
        throw new IllegalStateException("the count is not set");
      }
      AtomicLongArray returned = new AtomicLongArray(waiters);
      List<Thread> threads = new ArrayList<>();
      for (int i = 0; i < waiters; i++) {
        int waiter = i;
        Thread thread =
            new Thread(
                () -> {
                  try {
                    waiting.await();
                    returned.set(waiter, System.nanoTime());
                  } catch (InterruptedException e) {
                    Thread.currentThread().interrupt();
                  }
                });
        thread.start();
        threads.add(thread);
      }
      TimeUnit.NANOSECONDS.sleep(SETTLING);
      long sent = System.nanoTime();
      latch.countDown();
      long longest = 0;
      for (int i = 0; i < waiters; i++) {
        threads.get(i).join();
        if (returned.get(i) == 0) {
          throw new IllegalStateException("a waiter did not return");
        }
        longest = Math.max(longest, returned.get(i) - sent);
        wake.merge(bucketOf(returned.get(i) - sent), 1, Integer::sum);
      }
      last.merge(bucketOf(longest), 1, Integer::sum);
    }
    Map<String, Object> outcome = new HashMap<>();
    outcome.put("elapsed", System.nanoTime() - begin);
    outcome.put("shares", List.of(rounds * waiters));
    outcome.put("wake", wake);
    outcome.put("last", last);
    return outcome;
  }
}
