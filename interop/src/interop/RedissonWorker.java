package interop;

import com.google.gson.JsonObject;
import java.io.IOException;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLongArray;
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

/** The tasks of redlatch's benchmarks with Redisson. */
public final class RedissonWorker extends Worker {
  private static final long SETTLING = TimeUnit.MILLISECONDS.toNanos(300); // see latch.go
  private static final long LEASE_SECONDS = 30; // see peers_redis.go

  private static final Map<String, RedissonClient> CLIENTS = new HashMap<>();

  private final List<RedissonClient> clients = new ArrayList<>();

  private RedissonWorker(JsonObject task) {
    super(task);
    task.getAsJsonArray("addrs").forEach(addr -> clients.add(client("", addr.getAsString())));
  }

  public static void main(String[] args) throws IOException {
    serve(RedissonWorker::new);
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

  @Override
  Map<String, Object> work(long nanos, String name, boolean trace) throws Exception {
    return does("latch") ? latches(nanos, name) : super.work(nanos, name, trace);
  }

  @Override
  Operation operation(String name) {
    RedissonClient client = clients.get(0);
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
          public void release() throws Exception {
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
        return of(client.getRedLock(clients.stream().map(c -> c.getLock(name)).toArray(RLock[]::new)));
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
